"""The weights that a server with --quant_type computes with, made here from their definitions and from nothing of the server's.

INT8: one scale per row (LLM.int8()). NF4: groups of 64, whose scales are quantized in groups of 256 (QLoRA, double
quantization; the dynamic map is that of Dettmers, 8-bit Approximations for Parallelism in Deep Learning).
"""
NF4_LEVELS = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
              -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
              0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def dynamic_map(torch):
    """256 values: a sign, a decimal exponent in unary, and as many steps of the fraction as bits are left."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** i + 1)
        for middle in ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i - 6)).tolist():
            values += [middle, -middle]
    return torch.tensor(sorted(values))


def nearest(torch, values, levels):
    middles = (levels[1:] + levels[:-1]) / 2
    return levels[torch.bucketize(values, middles)]


def groups(torch, values, size):
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def nf4(torch, weight):
    grouped = groups(torch, weight, 64)
    scales = grouped.abs().amax(1)
    levels = nearest(torch, grouped / scales.clamp(min=1e-30)[:, None], torch.tensor(NF4_LEVELS))
    offset = scales.mean()
    centred = groups(torch, scales - offset, 256)
    outer = centred.abs().amax(1, keepdim=True).clamp(min=1e-30)
    scales = (nearest(torch, centred / outer, dynamic_map(torch)) * outer).view(-1)[:len(scales)] + offset
    return (levels * scales[:, None]).view(-1)[:weight.numel()].view(weight.shape)


def int8(torch, weight):
    largest = weight.abs().amax(1, keepdim=True)
    # A number divided by a tensor is multiplied with its reciprocal in torch, which rounds twice.
    return (weight * torch.full_like(largest, 127).div(largest)).round() * (largest / 127)


def quantize(torch, layers, quant_type):
    """Put in place of every matrix of the blocks what its quantized form stands for."""
    make = {"nf4": nf4, "int8": int8}[quant_type]
    with torch.no_grad():
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.copy_(make(torch, module.weight.float()))
