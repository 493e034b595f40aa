"""The launches of a decode step of a Llama-70B-shaped block, as kernels/src launches them.

Hidden 8192, 64 query heads and 8 KV heads of 128, MLP 28672, bf16 arithmetic and KV cache. Rows are
sessions with one new token each and `context` positions, the new one included.

Sizes of tiles come from the manifest of the images; `gemv`, `splits` and `norm_threads` are
kernels/src/tuning.rs's functions (COPIED), the order of launches gpu-worker/blocks/src/forward.rs's.
"""

import dataclasses

from .launch import Buffer, Wide

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 8192, 64, 8, 128, 28672
GROUP = HEADS // KV_HEADS
PAGE_TOKENS = 16
FORMATS = ["nf4", "int8", "bf16"]
KERNEL_FORMAT = {"nf4": "nf4", "int8": "int8", "bf16": "plain"}
ROWS = [1, 8, 32]
CONTEXT = 2048

# Functions of kernels/src/tuning.rs that are written again here, and a hash of their text: whoever
# changes one changes it here, too (test_budget.py).
COPIED = {
    "cuda_gemv": "e97b7e3572f9af9e",
    "cuda_cluster": "92d858477e539198",
    "cuda_attention_splits": "8ef67cb2fca2861a",
    "cuda_attention_mergers": "39cca4c936278841",
    "cuda_norm_threads": "763dd56a63855c00",
}


@dataclasses.dataclass
class Spec:
    """One launch."""

    name: str
    family: str
    image: str
    kernel: str
    grid: tuple
    cta: tuple
    shared: int
    parameters: list
    # Which CTAs and which of their warps stand for how many.
    ctas: list
    warps: list
    # Bytes that must come from the device's memory, and weights among them.
    memory_bytes: int = 0
    weights: int = 0
    # Bytes that a CTA has in flight while it waits for memory.
    in_flight: int = 0
    # Whether CTAs load what streams before they wait for the launch before.
    loads_early: bool = False
    # Launches of a kernel with the same `alike` have the same CTAs.
    alike: tuple = ()


def ceil(a, b):
    return -(-a // b)


def gemv(outputs, rows, is_nf4, multiprocessors, shared_bytes, exports):
    """tuning::cuda_gemv: (m, n, stages, bytes of shared memory, bytes of a stage)."""
    m = 2 if outputs >= 32 * multiprocessors else 1
    n = 1 if rows <= 8 else 2 if rows <= 16 else 4
    table = exports["TABLES_NF4"] if is_nf4 else 0
    stage = exports["STAGE_PER_TILE"] * m
    left = max(0, min(shared_bytes, 112 << 10) - table)
    stages = min(max(left // stage, 2), 4)
    return m, n, stages, table + stages * stage, stage


@dataclasses.dataclass
class Cluster:
    """Sizes of a launch of linear_cluster.cu."""

    rows: int
    grid: int
    ctas: int
    window: int
    shared: int


def cluster(strips, inputs, rows, is_nf4, multiprocessors, shared_bytes, exports):
    """tuning::cuda_cluster."""
    segments, tile, ctas = exports["SEGMENTS"], exports["TILE_BYTES"], exports["CLUSTER"]
    variant = next(at for at, most in enumerate([1, 8, 16, 32]) if rows <= most)
    units = max(multiprocessors // 16 * (16 // ctas), 1)
    row = [exports["ROW_BYTES"], tile, 2 * tile, 4 * tile][variant]
    block, segment = segments // ctas * row, ceil(ceil(inputs, 256), segments) * 4
    table, sums = exports["TABLE_NF4"] if is_nf4 else 0, exports["SUM_BYTES"]
    left = max(shared_bytes - table - sums, 0)
    window = min(max(left // block, 1), segment)
    shared = table + window * block + sums
    return Cluster([1, 8, 16, 32][variant], min(max(strips, 1), units) * ctas, ctas, window, shared)


def splits(multiprocessors, pairs):
    """tuning::cuda_attention_splits."""
    return min(max(ceil(2 * 6 * max(multiprocessors, 1), max(pairs, 1)), 1), 1024)


def mergers_of(multiprocessors, pairs, exports):
    """tuning::cuda_attention_mergers."""
    return min(max(16 * max(multiprocessors, 1) // max(pairs, 1), 1), exports["MERGERS"])


def norm_threads(width):
    """tuning::cuda_norm_threads."""
    return min(max(ceil(ceil(width, 8), 32) * 32, 32), 512)


def matrix_bytes(quant, outputs, inputs):
    """Bytes of a matrix on the device; NF4: tiles of codes and of scales of 64 (nf4.cuh), and their
    scales of 256 groups."""
    weights = outputs * inputs
    if quant == "nf4":
        strips, blocks = ceil(outputs, 16), inputs // 64
        return strips * (blocks * 512 + ceil(blocks, 4) * 64) + 4 * ceil(weights, 64 * 256)
    if quant == "int8":
        return weights + 4 * outputs
    return 2 * weights


def of_tiles(manifest, device, name, quant, rows, inputs, outputs):
    """One launch of linear_gemv.cu over up to 3 matrices."""
    exports = manifest["linear_gemv"]["exports"]
    m, n, stages, shared, stage = gemv(
        sum(outputs), rows, quant == "nf4", device.multiprocessors, device.shared_cta << 10, exports
    )
    # NF4: 256 groups share a second scale (nf4.cuh).
    parameters, layout = [], 8 if quant == "nf4" else 0
    for number in range(3):
        if number < len(outputs):
            weight = Buffer(f"weight{number}", is_streamed=True)
            parameters += [weight, None, Buffer(f"out{number}"), outputs[number], layout]
        else:
            parameters += [None, None, None, 0, 0]
    tiles = sum(ceil(count, 16 * m) for count in outputs)
    warps = exports["CTA_THREADS"] // 32
    return Spec(
        name=name,
        family=f"linear_{quant}",
        image="linear_gemv",
        kernel=f"linear_gemv_{KERNEL_FORMAT[quant]}_bf16_m{m}{'r1' if rows == 1 else f'n{n}'}",
        grid=(tiles, 1, 1),
        cta=(exports["CTA_THREADS"], 1, 1),
        shared=shared,
        parameters=[*parameters, Buffer("x"), inputs, rows, stages],
        ctas=[((0, 0, 0), tiles)],
        warps=[(0, 1), (1, warps - 1)],
        memory_bytes=sum(matrix_bytes(quant, count, inputs) for count in outputs),
        weights=sum(outputs) * inputs,
        in_flight=(stages - 1) * stage,
        alike=(inputs, rows, stages),
    )


def pack(rows, inputs):
    """The activations of several rows for linear_gemv.cu."""
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    return Spec(
        name="pack",
        family="other",
        image="linear_pack",
        kernel="linear_pack_bf16",
        grid=(inputs // 64, tiles, 1),
        cta=(32, 1, 1),
        shared=0,
        parameters=[Buffer("x"), Buffer("packed"), inputs, rows],
        ctas=[((0, 0, 0), inputs // 64 * tiles)],
        warps=[(0, 1)],
    )


def of_clusters(manifest, device, name, quant, rows, inputs, outputs, gated=False, normed=False):
    """One launch of linear_cluster.cu over up to 3 matrices, or over gate and up; `normed`: its
    input is added to and normed first."""
    exports = manifest["linear_cluster"]["exports"]
    strips = sum(ceil(count, exports["STRIP"]) for count in outputs)
    sizes = cluster(
        *(strips, inputs, rows, quant == "nf4", device.multiprocessors),
        *(device.shared_cta << 10, exports),
    )
    # NF4: 256 groups share a second scale (nf4.cuh).
    parameters, layout = [], 8 if quant == "nf4" else 0
    for number in range(3):
        if number < len(outputs):
            weight = Buffer(f"weight{number}", is_streamed=True)
            parameters += [weight, None, Buffer(f"out{number}"), outputs[number], layout]
        else:
            parameters += [None, None, None, 0, 0]
    norm = [Buffer("y"), Buffer("norm"), Buffer("sum"), 1e-5] if normed else [None, None, None, 0.0]
    warps = exports["CTA_THREADS"] // 32
    of_group = exports["SEGMENTS"] // sizes.ctas
    # Units of CTAs by their numbers of strips; the first of each stands for the others.
    units, of_strips = sizes.grid // sizes.ctas, {}
    # Strips of gate and up stay together.
    items = strips // 2 if gated else strips
    for unit in range(units):
        count = items * (unit + 1) // units - items * unit // units
        of_strips.setdefault(count, []).append(unit)
    return Spec(
        name=name,
        family=f"linear_{quant}",
        image="linear_cluster",
        kernel=f"linear_cluster_{KERNEL_FORMAT[quant]}_bf16_r{sizes.rows}",
        grid=(sizes.grid, 1, 1),
        cta=(exports["CTA_THREADS"], 1, 1),
        shared=sizes.shared,
        parameters=[*parameters, Buffer("x"), inputs, rows, sizes.window, int(gated), *norm],
        # The CTAs of a cluster have the same work, and so have the warps of a group.
        ctas=[
            ((same[0] * sizes.ctas, 0, 0), len(same) * sizes.ctas) for same in of_strips.values()
        ],
        warps=[(number, of_group) for number in range(0, warps, of_group)],
        memory_bytes=sum(matrix_bytes(quant, count, inputs) for count in outputs),
        weights=sum(outputs) * inputs,
    )


def is_joint(manifest, device, rows):
    """Whether linear_cluster.cu does more than to multiply (are_one_launch of ops/linear.rs)."""
    return (
        device.architecture == "90a" and rows <= manifest["linear_cluster"]["exports"]["GATED_ROWS"]
    )


def normed(manifest, device, quant, rows, *outputs):
    """Queries, keys and values of the norm of a sum, as launch_normed chooses it."""
    sizes = (rows, HIDDEN, outputs)
    if is_joint(manifest, device, rows):
        return [of_clusters(manifest, device, "norm_qkv", quant, *sizes, normed=True)]
    return [norm(manifest, rows), *products(manifest, device, "qkv", quant, *sizes)]


def gated(manifest, device, quant, rows):
    """Gate and up of the norm of a sum, with their activation."""
    sizes = (rows, HIDDEN, (MLP, MLP))
    if is_joint(manifest, device, rows):
        joint = {"gated": True, "normed": True}
        return [of_clusters(manifest, device, "norm_gate_up_silu", quant, *sizes, **joint)]
    return [
        norm(manifest, rows),
        *products(manifest, device, "gate_up", quant, *sizes),
        silu_mul(rows),
    ]


def products(manifest, device, name, quant, rows, inputs, outputs):
    """Launches for up to 3 matrices, as kernels/src/cuda/ops/linear.rs chooses them."""
    segments = manifest["linear_cluster"]["exports"]["SEGMENTS"]
    sizes = (quant, rows, inputs, outputs)
    if device.architecture == "90a" and inputs > 256 * (segments - 1):
        return [of_clusters(manifest, device, name, *sizes)]
    before = [pack(rows, inputs)] if rows > 1 else []
    return [*before, of_tiles(manifest, device, name, *sizes)]


def batch(rows, context):
    """The words of a step (kernels/src/cuda/batch.rs): every row has one new token, the last."""
    pages = ceil(context, PAGE_TOKENS)
    tiles = ceil(context, 64)
    arrays = [
        list(range(rows)),
        [context - 1] * rows,
        [context - 1] * rows,
        [row * pages for row in range(rows)],
        list(range(rows * pages)),
        list(range(rows + 1)),
    ]
    words, at = [rows, rows], 3 + len(arrays)
    for array in arrays:
        words.append(at)
        at += len(array)
    words.append(0)
    for array in arrays:
        words += array
    return Buffer("batch", tuple(words + [row * tiles for row in range(rows)]))


def attention(manifest, device, rows, context):
    """attention_decode and attention_join."""
    exports = manifest["attention_decode"]["exports"]
    shared, keys = exports[f"SHARED_D{HEAD_DIM}"], exports["TILE_KEYS"]
    words, tiles = batch(rows, context), ceil(context, keys)
    split, pairs = splits(device.multiprocessors, KV_HEADS * rows), KV_HEADS * rows
    # CTAs take single tiles, or groups of them (by_groups in attention_decode.cu).
    groups = ceil(tiles, exports["GROUP_TILES"])
    has_groups = groups > 1 and groups * exports["GROUP_SHARE"] >= split
    units = groups if has_groups else tiles
    extra = units % split
    # The last unit has the new key.
    last = (extra or split) - 1
    samples = [
        ((0, 0, 0), last * pairs),
        ((last, 0, 0), pairs),
        ((extra, 0, 0), (split - extra) * pairs if extra else 0),
    ]
    workspace, window = Buffer("workspace"), 0xFFFFFFFF
    pages = Buffer("pages", is_streamed=True)
    new = [Buffer(name) for name in ("q", "k", "v", "angles")]
    scores = [1.0 / HEAD_DIM**0.5, 0.0, window]
    decode = Spec(
        name="attention_decode",
        family="attention",
        image="attention_decode",
        kernel=f"attention_decode_bf16_d{HEAD_DIM}",
        grid=(split, KV_HEADS, rows),
        cta=(32, 1, 1),
        shared=shared,
        parameters=[
            *new,
            pages,
            Buffer("outbox"),
            0,
            words,
            None,
            workspace,
            KV_HEADS,
            GROUP,
            *scores,
        ],
        ctas=[sample for sample in samples if sample[1]],
        warps=[(0, 1)],
        memory_bytes=rows * context * KV_HEADS * HEAD_DIM * 4,
        in_flight=shared,
        loads_early=True,
    )
    mergers = mergers_of(device.multiprocessors, HEADS * rows, exports)
    threads = HEAD_DIM // 4
    first = min(mergers, groups)
    join = Spec(
        name="attention_join",
        family="other",
        image="attention_decode",
        kernel="attention_join",
        grid=(HEADS, rows, 1),
        cta=(threads, mergers, 1),
        shared=mergers * (exports["JOIN_SHARED_BASE"] + exports["JOIN_SHARED_PER_DIM"] * HEAD_DIM),
        parameters=[workspace, words, Buffer("out"), None, HEAD_DIM, GROUP, window, split],
        ctas=[((0, 0, 0), HEADS * rows)],
        # A warp is a row of threads; the first one also merges the groups.
        warps=[
            (0, 1),
            *[(1, first - 1)][: first > 1],
            *[(first, mergers - first)][: first < mergers],
        ],
    )
    return [decode, join]


def norm(manifest, rows):
    threads = norm_threads(HIDDEN)
    return Spec(
        name="rmsnorm_add",
        family="other",
        image="rmsnorm",
        kernel="rmsnorm_add_bf16",
        grid=(rows, 1, 1),
        cta=(threads, 1, 1),
        shared=manifest["rmsnorm"]["exports"]["SHARED_PER_BLOCK"] * ceil(HIDDEN, 64),
        parameters=[*map(Buffer, ("x", "y")), Buffer("weight", (), True), Buffer("out"), HIDDEN]
        + [1e-5],
        ctas=[((0, 0, 0), rows)],
        warps=[(0, 1), (1, threads // 32 - 1)],
        memory_bytes=4 * HIDDEN,
        loads_early=True,
    )


def silu_mul(rows):
    count = ceil(rows * MLP, 1024)
    return Spec(
        name="silu_mul",
        family="other",
        image="silu_mul",
        kernel="silu_mul_bf16",
        grid=(count, 1, 1),
        cta=(256, 1, 1),
        shared=0,
        parameters=[Buffer("gate"), Buffer("up"), Wide(rows * MLP)],
        ctas=[((0, 0, 0), count)],
        warps=[(0, 1), (1, 7)],
    )


def block(manifest, device, quant, rows, context=CONTEXT):
    """The launches of a block in their order."""

    def product(name, inputs, *outputs):
        return products(manifest, device, name, quant, rows, inputs, outputs)

    kv = KV_HEADS * HEAD_DIM
    return [
        *normed(manifest, device, quant, rows, HIDDEN, kv, kv),
        *attention(manifest, device, rows, context),
        *product("o", HIDDEN, HIDDEN),
        *gated(manifest, device, quant, rows),
        *product("down", MLP, HIDDEN),
    ]
