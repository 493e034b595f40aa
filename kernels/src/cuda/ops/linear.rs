//! Launches `linear_gemv.cu`, `linear_cluster.cu`, `linear_gemm.cu`, `linear_wgmma.cu` and `linear_generic.cu`.

use shared::config::QuantType;
use shared::dtype::DType;
use shared::warpgroups::WarpgroupKernel;

use crate::backend::norm_then_multiply;
use crate::cuda::gpu::ctas;
use crate::cuda::{Address, Cuda, Floats, Gpu, Launch, Matrix, Params};
use crate::ops::{
    Gated, Linear, MatrixShape, NormedProducts, OpError, Product, Products, SumPlace,
};
use crate::sizes;
use crate::tuning;

/// Matrices that one launch multiplies with the same input.
pub(crate) const MAX_PRODUCTS: usize = 3;

pub(crate) fn launch<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Linear<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    let mut product = Product { weight: args.weight, bias: args.bias, out: args.out };
    launch_products(
        cuda,
        Products { x: args.x, rows: args.rows, parts: std::slice::from_mut(&mut product) },
    )
}

/// Each product has the bits that it has alone. Up to [`MAX_PRODUCTS`] matrices of one format,
/// dtype and number of inputs share a launch.
pub(crate) fn launch_products<G: Gpu>(
    cuda: &mut Cuda<G>,
    args: Products<'_, '_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    args.check()?;
    let Products { x, rows, parts } = args;
    let Some(first) = parts.first().map(|product| product.weight.clone()) else {
        return Ok(());
    };
    if rows == 0 {
        return Ok(());
    }
    let is_alike = |other: &Matrix<G>| {
        let kind = |m: &Matrix<G>| (m.quant(), m.dtype(), m.inputs());
        kind(other) == kind(&first)
    };
    let together =
        parts.len() <= MAX_PRODUCTS && parts.iter().all(|product| is_alike(&product.weight));
    let all_tiled = parts.iter().all(|product| product.weight.is_tiled());
    if !together || !all_tiled {
        if let [product] = parts {
            return generic(cuda, x, rows, product);
        }
        return parts.iter_mut().try_for_each(|product| {
            let parts = std::slice::from_mut(product);
            launch_products(cuda, Products { x, rows, parts })
        });
    }
    if rows <= tuning::CUDA_GEMV_ROWS {
        gemv(cuda, x, rows, &first, parts)
    } else if cuda.used_warpgroups().contains(by_warpgroups(&first)) {
        gemm_by_warpgroups(cuda, x, rows, &first, parts)
    } else {
        gemm(cuda, x, rows, &first, parts)
    }
}

/// In one launch where clusters take the products and registers suffice, else as products and an
/// activation.
pub(crate) fn launch_gated<G: Gpu>(
    cuda: &mut Cuda<G>,
    mut args: Gated<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    args.check()?;
    let (x, rows) = (args.x, args.rows);
    let like = args.parts[0].weight.clone();
    if are_one_launch(cuda, rows, &args.parts) && args.round == like.dtype() {
        return gemv_by_clusters(cuda, x, rows, &like, &mut args.parts, true, None);
    }
    launch_products(cuda, Products { x, rows, parts: &mut args.parts })?;
    super::silu_mul::launch(cuda, args.activation())
}

/// In one launch where clusters take the products and registers suffice, else as a norm and
/// products. Only the launch leaves the sum beside `x`: others still read that.
pub(crate) fn launch_normed<G: Gpu>(
    cuda: &mut Cuda<G>,
    mut args: NormedProducts<'_, '_, Floats, Matrix<G>>,
) -> Result<SumPlace, OpError> {
    args.check()?;
    let (rows, width, round) = (args.norm.rows, args.norm.width, args.norm.round);
    let is_one = args.norm.bias.is_none()
        && width <= sizes::linear_cluster::NORM_WIDTH
        && args.parts.len() <= MAX_PRODUCTS
        && are_one_launch(cuda, rows, args.parts)
        && args.parts.iter().all(|part| part.weight.dtype() == round);
    if !is_one {
        return norm_then_multiply(cuda, args);
    }
    let norm = Normed {
        y: args.norm.y.address(),
        weight: args.norm.weight.address(),
        sum: args.sum.address(),
        eps: args.norm.eps,
    };
    let like = args.parts[0].weight.clone();
    let x = &*args.norm.x;
    gemv_by_clusters(cuda, x, rows, &like, args.parts, args.is_gated, Some(norm))?;
    Ok(SumPlace::Sum)
}

/// Whether one launch of `linear_cluster.cu` does more than to multiply with these matrices:
/// activates, or norms before.
fn are_one_launch<G: Gpu>(
    cuda: &Cuda<G>,
    rows: usize,
    products: &[Product<'_, Floats, Matrix<G>>],
) -> bool {
    let Some(like) = products.first().map(|product| &product.weight) else {
        return false;
    };
    let kind = |m: &Matrix<G>| (m.quant(), m.dtype(), m.inputs(), m.is_tiled());
    (1..=sizes::linear_cluster::GATED_ROWS).contains(&rows)
        && like.is_tiled()
        && products.iter().all(|product| kind(&product.weight) == kind(like))
        && by_clusters(cuda, like, products)
}

/// The norm of the input of products, in addresses.
struct Normed {
    y: Address,
    weight: Address,
    sum: Address,
    eps: f32,
}

/// The kernel for warpgroups that multiplies many rows with a tiled matrix.
fn by_warpgroups<G: Gpu>(matrix: &Matrix<G>) -> WarpgroupKernel {
    WarpgroupKernel::Product(matrix.quant(), matrix.dtype())
}

/// The variant of a kernel for a format and a dtype: `[plain, int8, nf4]` of `[f32, bf16, f16]`.
pub(super) fn by_format<G: Gpu>(names: [[&'static str; 3]; 3], matrix: &Matrix<G>) -> &'static str {
    let names = match matrix.quant() {
        QuantType::None => names[0],
        QuantType::Int8 => names[1],
        QuantType::Nf4 => names[2],
    };
    super::by_dtype(names, matrix.dtype())
}

fn generic<G: Gpu>(
    cuda: &mut Cuda<G>,
    x: &Floats,
    rows: usize,
    product: &mut Product<'_, Floats, Matrix<G>>,
) -> Result<(), OpError> {
    let weight = &product.weight;
    let launch = Launch {
        kernel: by_format(GENERIC, weight),
        grid: [
            ctas(weight.outputs().div_ceil(sizes::linear_generic::OUTPUTS)),
            ctas(rows.div_ceil(sizes::linear_generic::ROWS)),
            1,
        ],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new()
            .address(weight.start())
            .count(weight.layout())
            .read(x)
            .read_optional(product.bias)
            .write(product.out)
            .count(weight.outputs())
            .count(weight.inputs())
            .count(rows),
    };
    // SAFETY: `launch_products` has made sure of `rows` rows of inputs and outputs, and a matrix
    // has the bytes of its shape.
    unsafe { cuda.launch(launch) }
}

/// The parameters of `LINEAR_PRODUCTS` in `linear.cuh`; products that do not exist have no outputs.
fn params_of<G: Gpu>(products: &mut [Product<'_, Floats, Matrix<G>>]) -> Params {
    let mut params = Params::new();
    for product in products.iter_mut() {
        params = params
            .address(product.weight.start())
            .read_optional(product.bias)
            .write(product.out)
            .count(product.weight.outputs())
            .count(product.weight.layout());
    }
    for _ in products.len()..MAX_PRODUCTS {
        let nowhere = Address(0);
        params = params.address(nowhere).address(nowhere).address(nowhere).count(0).count(0);
    }
    params
}

fn tiles<G: Gpu>(products: &[Product<'_, Floats, Matrix<G>>], outputs: usize) -> usize {
    let of = |product: &Product<'_, Floats, Matrix<G>>| product.weight.outputs().div_ceil(outputs);
    products.iter().map(of).sum()
}

fn gemv<G: Gpu>(
    cuda: &mut Cuda<G>,
    x: &Floats,
    rows: usize,
    like: &Matrix<G>,
    products: &mut [Product<'_, Floats, Matrix<G>>],
) -> Result<(), OpError> {
    if by_clusters(cuda, like, products) {
        return gemv_by_clusters(cuda, x, rows, like, products, false, None);
    }
    let device = cuda.gpu().properties();
    let outputs = products.iter().map(|p| p.weight.outputs()).sum();
    let sizes = tuning::cuda_gemv(
        outputs,
        rows,
        like.quant() == QuantType::Nf4,
        device.multiprocessors as usize,
        device.shared_bytes as usize,
    );
    let kernel = gemv_kernel(like, sizes, rows);
    let launch = |x: Address, products: &mut [Product<'_, Floats, Matrix<G>>]| Launch {
        kernel,
        grid: [ctas(tiles(products, 16 * sizes.m)), 1, 1],
        cta: [ctas(sizes::linear_gemv::CTA_THREADS), 1, 1],
        shared_bytes: ctas(sizes.shared_bytes),
        params: params_of(products).address(x).count(like.inputs()).count(rows).count(sizes.stages),
    };
    if rows == 1 {
        // SAFETY: as in `generic`; the matrices begin at multiples of 256, their rows are whole
        // blocks.
        return unsafe { cuda.launch(launch(x.address(), products)) };
    }
    let bytes = tuning::cuda_packed_bytes(like.inputs(), 8 * sizes.n);
    let own = match cuda.fixed() {
        Some(_) => None,
        None => Some(cuda.scratch(bytes)?),
    };
    let packed = match (&own, cuda.fixed()) {
        (Some(own), _) => own.address(),
        (None, Some(fixed)) if bytes <= fixed.workspace.bytes() => fixed.workspace.address(),
        (None, _) => {
            let what = "more inputs than recorded steps have memory for";
            return Err(OpError::Shape { op: "linear", what });
        }
    };
    let is_f16 = usize::from(like.dtype() == DType::F16);
    let pack = Launch {
        kernel: ["linear_pack_bf16", "linear_pack_f16"][is_f16],
        grid: [ctas(like.inputs() / 64), ctas(sizes.n), 1],
        cta: [32, 1, 1],
        shared_bytes: 0,
        params: Params::new().read(x).address(packed).count(like.inputs()).count(rows),
    };
    // SAFETY: `packed` has room for all tiles of rows; what else uses the memory of a fixed step
    // comes before or after both launches.
    unsafe { cuda.launch(pack)? };
    // SAFETY: as above.
    unsafe { cuda.launch(launch(packed, products)) }
}

fn gemv_kernel<G: Gpu>(like: &Matrix<G>, sizes: tuning::CudaGemv, rows: usize) -> &'static str {
    let format = match like.quant() {
        QuantType::None => 0,
        QuantType::Int8 => 1,
        QuantType::Nf4 => 2,
    };
    let dtype = if like.dtype() == DType::F16 { 1 } else { 0 };
    let m = if sizes.m == 2 { 1 } else { 0 };
    let n = match (rows, sizes.n) {
        (1, _) => 0,
        (_, 1) => 1,
        (_, 2) => 2,
        _ => 3,
    };
    GEMV[format][dtype][m][n]
}

/// Whether clusters of CTAs take products of few rows.
fn by_clusters<G: Gpu>(
    cuda: &Cuda<G>,
    like: &Matrix<G>,
    products: &[Product<'_, Floats, Matrix<G>>],
) -> bool {
    // Distances within a matrix have 32 bits there.
    let are_near = products.iter().all(|p| p.weight.bytes() < 1 << 32);
    cuda.gpu().properties().has_clusters() && are_near && tuning::cuda_may_cluster(like.inputs())
}

/// The same on clusters of CTAs. With `is_gated`, the two products are gate and up of an MLP, and
/// the activated gate is written. The input may have to be normed first; a whole segment of it is
/// then in shared memory.
fn gemv_by_clusters<G: Gpu>(
    cuda: &mut Cuda<G>,
    x: &Floats,
    rows: usize,
    like: &Matrix<G>,
    products: &mut [Product<'_, Floats, Matrix<G>>],
    is_gated: bool,
    norm: Option<Normed>,
) -> Result<(), OpError> {
    let nothing = Address(0);
    let norm = norm.unwrap_or(Normed { y: nothing, weight: nothing, sum: nothing, eps: 0.0 });
    let device = cuda.gpu().properties();
    let sizes = tuning::cuda_cluster(
        tiles(products, sizes::linear_cluster::STRIP),
        like.inputs(),
        rows,
        like.quant() == QuantType::Nf4,
        device.multiprocessors as usize,
        device.shared_bytes as usize,
    );
    let format = match like.quant() {
        QuantType::None => 0,
        QuantType::Int8 => 1,
        QuantType::Nf4 => 2,
    };
    let is_f16 = usize::from(like.dtype() == DType::F16);
    let launch = Launch {
        kernel: BY_CLUSTERS[format][is_f16][sizes.variant],
        grid: [ctas(sizes.grid), 1, 1],
        cta: [ctas(sizes::linear_cluster::CTA_THREADS), 1, 1],
        shared_bytes: ctas(sizes.shared_bytes),
        params: params_of(products)
            .read(x)
            .count(like.inputs())
            .count(rows)
            .count(sizes.window)
            .count(usize::from(is_gated))
            .address(norm.y)
            .address(norm.weight)
            .address(norm.sum)
            .float(norm.eps),
    };
    // SAFETY: as in `gemv`; gated products have the same outputs; the check of a norm has made sure
    // that what is added, and its sum, have the size of x.
    unsafe { cuda.launch(launch) }
}

fn gemm<G: Gpu>(
    cuda: &mut Cuda<G>,
    x: &Floats,
    rows: usize,
    like: &Matrix<G>,
    products: &mut [Product<'_, Floats, Matrix<G>>],
) -> Result<(), OpError> {
    let len = rows.saturating_mul(like.inputs());
    let rounded = cuda.scratch(len.saturating_mul(2))?;
    let (convert, is_f16) = match like.dtype() {
        DType::F16 => ("convert_f32_f16", true),
        DType::F32 | DType::Bf16 => ("convert_f32_bf16", false),
    };
    super::convert::launch(cuda, convert, x.address(), rounded.address(), len)?;
    use sizes::linear_gemm::{SHARED_INT8, SHARED_NF4, SHARED_PLAIN, TILE_OUTPUTS, TILE_ROWS};
    let (names, shared_bytes) = match like.quant() {
        QuantType::None => (["linear_gemm_plain_bf16", "linear_gemm_plain_f16"], SHARED_PLAIN),
        QuantType::Int8 => (["linear_gemm_int8_bf16", "linear_gemm_int8_f16"], SHARED_INT8),
        QuantType::Nf4 => (["linear_gemm_nf4_bf16", "linear_gemm_nf4_f16"], SHARED_NF4),
    };
    let launch = Launch {
        kernel: names[usize::from(is_f16)],
        grid: [ctas(rows.div_ceil(TILE_ROWS)), ctas(tiles(products, TILE_OUTPUTS)), 1],
        cta: [256, 1, 1],
        shared_bytes: ctas(shared_bytes),
        params: params_of(products).address(rounded.address()).count(like.inputs()).count(rows),
    };
    // SAFETY: as in `gemv`; `rounded` holds `rows` rows of 16-bit numbers.
    unsafe { cuda.launch(launch) }
}

/// The same on warpgroups: a kernel first copies x into tiles.
fn gemm_by_warpgroups<G: Gpu>(
    cuda: &mut Cuda<G>,
    x: &Floats,
    rows: usize,
    like: &Matrix<G>,
    products: &mut [Product<'_, Floats, Matrix<G>>],
) -> Result<(), OpError> {
    use sizes::linear_wgmma::{TILE_OUTPUTS, TILE_ROWS};
    let row_tiles = rows.div_ceil(TILE_ROWS);
    let tiled = cuda.scratch((row_tiles * TILE_ROWS * 2).saturating_mul(like.inputs()))?;
    let format = match like.quant() {
        QuantType::None => 0,
        QuantType::Int8 => 1,
        QuantType::Nf4 => 2,
    };
    let is_f16 = usize::from(like.dtype() == DType::F16);
    let pieces = rows.saturating_mul(like.inputs() / 8);
    let tile = Launch {
        kernel: ["linear_wgmma_x_bf16", "linear_wgmma_x_f16"][is_f16],
        grid: [ctas(pieces.div_ceil(256)), 1, 1],
        cta: [256, 1, 1],
        shared_bytes: 0,
        params: Params::new().read(x).address(tiled.address()).count(like.inputs()).count(rows),
    };
    // SAFETY: `launch_products` has made sure of `rows` rows of whole blocks, and the tiles hold as
    // many.
    unsafe { cuda.launch(tile)? };
    // CTAs that fill the last cluster have no outputs.
    let output_tiles = tiles(products, TILE_OUTPUTS).next_multiple_of(WARPGROUP_CLUSTER[format]);
    let launch = Launch {
        kernel: BY_WARPGROUPS[format][is_f16],
        grid: [ctas(row_tiles), ctas(output_tiles), 1],
        cta: [256, 1, 1],
        shared_bytes: ctas(WARPGROUP_BYTES[format]),
        params: params_of(products).address(tiled.address()).count(like.inputs()).count(rows),
    };
    // SAFETY: as in `gemv`; `tiled` holds the tiles of `rows` rows.
    unsafe { cuda.launch(launch) }
}

/// By format and dtype.
const BY_WARPGROUPS: [[&str; 2]; 3] = [
    ["linear_wgmma_plain_bf16", "linear_wgmma_plain_f16"],
    ["linear_wgmma_int8_bf16", "linear_wgmma_int8_f16"],
    ["linear_wgmma_nf4_bf16", "linear_wgmma_nf4_f16"],
];

/// CTAs of a cluster of `linear_wgmma.cu`, by format.
const WARPGROUP_CLUSTER: [usize; 3] = [
    sizes::linear_wgmma::CLUSTER_PLAIN,
    sizes::linear_wgmma::CLUSTER_INT8,
    sizes::linear_wgmma::CLUSTER_NF4,
];

/// Shared memory of `linear_wgmma.cu`, by format.
const WARPGROUP_BYTES: [usize; 3] = [
    sizes::linear_wgmma::SHARED_PLAIN,
    sizes::linear_wgmma::SHARED_INT8,
    sizes::linear_wgmma::SHARED_NF4,
];

const GENERIC: [[&str; 3]; 3] = [
    ["linear_generic_plain_f32", "linear_generic_plain_bf16", "linear_generic_plain_f16"],
    ["linear_generic_int8_f32", "linear_generic_int8_bf16", "linear_generic_int8_f16"],
    ["linear_generic_nf4_f32", "linear_generic_nf4_bf16", "linear_generic_nf4_f16"],
];

/// By format, dtype, tiles of outputs and tiles of rows, of which the first is for one row.
const GEMV: [[[[&str; 4]; 2]; 2]; 3] = {
    macro_rules! sizes {
        ($name:literal) => {
            [
                [
                    concat!($name, "_m1r1"),
                    concat!($name, "_m1n1"),
                    concat!($name, "_m1n2"),
                    concat!($name, "_m1n4"),
                ],
                [
                    concat!($name, "_m2r1"),
                    concat!($name, "_m2n1"),
                    concat!($name, "_m2n2"),
                    concat!($name, "_m2n4"),
                ],
            ]
        };
    }
    [
        [sizes!("linear_gemv_plain_bf16"), sizes!("linear_gemv_plain_f16")],
        [sizes!("linear_gemv_int8_bf16"), sizes!("linear_gemv_int8_f16")],
        [sizes!("linear_gemv_nf4_bf16"), sizes!("linear_gemv_nf4_f16")],
    ]
};

/// By format, dtype and rows.
const BY_CLUSTERS: [[[&str; 4]; 2]; 3] = {
    macro_rules! rows {
        ($name:literal) => {
            [
                concat!($name, "_r1"),
                concat!($name, "_r8"),
                concat!($name, "_r16"),
                concat!($name, "_r32"),
            ]
        };
    }
    [
        [rows!("linear_cluster_plain_bf16"), rows!("linear_cluster_plain_f16")],
        [rows!("linear_cluster_int8_bf16"), rows!("linear_cluster_int8_f16")],
        [rows!("linear_cluster_nf4_bf16"), rows!("linear_cluster_nf4_f16")],
    ]
};

#[cfg(all(test, feature = "emu"))]
mod tests;
