// The mixture of experts apart from its large products: routing, lists, gathering, the sum over the
//   experts of a token, and the generic product.
//   experts_group: weights as in route.cu, and the lists of experts.cuh
//   experts_gather: out[p] = round(x[token of pair p])
//   experts_generic: out[p] = round(x[p]) weight^T of the expert of p, as linear_generic.cu
//   experts_combine: out[t] = sum over the experts of t in their order
//
// Reference: kernels/src/ops/experts.rs. Source: transformers MixtralSparseMoeBlock.
// Grids depend only on the number of tokens, so that launches can be recorded: at most tokens x
//   chosen pairs exist, and at most as many tiles. CTAs without a tile end at once.
// experts_group: one CTA of 16 warps. A warp first computes the weights of one token at a time,
//   then lists the tokens of one expert at a time, 32 of them per ballot. Lists are ordered by
//   number.
// experts_gather, experts_combine: x pairs or tokens; experts_combine has y tiles of 1,024
//   elements.
// experts_generic: as linear_generic.cu, with x pairs and y tiles of outputs.
// Order of sums: those of a row do not depend on the other rows of its experts. Experts are added
//   in their order, rounded as scatter_add does.
// Bound: the launches of experts_group and experts_combine; rows in and out of experts_gather.
// Limits: 256 experts.
// expects experts_generic_*: no LDL STL
// expects experts_group_*: no LDL STL
// expects experts_gather_*: LDG.128 STG.128
// expects experts_combine_*: LDG.128 STG.128
#include "experts.cuh"
#include "linear_generic.cuh"
#include "pairs.cuh"
#include "pdl.cuh"
#include "route.cuh"

#define GROUP_WARPS 16
// Shared memory of experts_group: two lists of experts + 1 words.
EXPORT(GROUP_THREADS, GROUP_WARPS * 32);
EXPORT(GROUP_SHARED_PER_START, 2 * 4);

// Number of voting lanes before this one.
__device__ __forceinline__ uint32_t before(uint32_t votes) {
    return __popc(votes & ((1u << threadIdx.x % 32) - 1));
}

// Writes the list of experts of a token from its weights.
__device__ __forceinline__ void list_experts(const float* weights, uint32_t experts,
                                             uint32_t chosen, uint32_t* expert_of,
                                             uint32_t* pair_of) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t listed = 0;
    for (uint32_t from = 0; from < experts; from += 32) {
        // NaN counts as a weight, so that the result becomes NaN, too.
        const bool takes = from + lane < experts && weights[from + lane] != 0.0f;
        const uint32_t votes = __ballot_sync(~0u, takes);
        if (takes) expert_of[listed + before(votes)] = from + lane;
        listed += __popc(votes);
    }
    for (uint32_t i = listed + lane; i < chosen; i += 32) expert_of[i] = pair_of[i] = NONE;
}

template <class T>
__device__ __forceinline__ void group(float* logits, uint32_t* words, const uint32_t* batch,
                                      const uint32_t* token_adapter, uint32_t tokens,
                                      uint32_t chosen, uint32_t experts, uint32_t adapters,
                                      uint32_t tile_rows, uint32_t is_routed) {
    SMEM_DYN(shared);
    pdl_launch();
    pdl_wait();
    uint32_t *counts = reinterpret_cast<uint32_t*>(shared), *starts = counts + experts + 1;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = threadIdx.x;
    const uint32_t there = batch ? min(batch[1], tokens) : tokens;
    const Lists lists = lists_of(words, tokens, chosen, experts);

    for (uint32_t token = warp; token < tokens; token += GROUP_WARPS) {
        float* row = logits + (size_t)token * experts;
        if (token < there && !is_routed) route_token<T>(row, experts, chosen);
        __syncwarp();
        const size_t at = (size_t)token * chosen;
        list_experts(row, token < there ? experts : 0, chosen, lists.token_expert + at,
                     lists.token_pair + at);
    }
    __syncthreads();
    for (uint32_t expert = warp; expert < experts; expert += GROUP_WARPS) {
        uint32_t count = 0;
        for (uint32_t from = 0; from < there; from += 32)
            count += __popc(__ballot_sync(
                ~0u,
                from + lane < there && logits[(size_t)(from + lane) * experts + expert] != 0.0f));
        if (lane == 0) counts[expert] = count;
    }
    __syncthreads();
    if (thread <= experts) {
        uint32_t pairs = 0, tiles = 0;
        for (uint32_t expert = 0; expert < thread; expert++) {
            pairs += counts[expert];
            tiles += (counts[expert] + tile_rows - 1) / tile_rows;
        }
        starts[thread] = lists.start[thread] = pairs;
        if (thread == experts) {
            lists.count[0] = pairs;
            lists.count[1] = tiles;
        } else {
            for (uint32_t row = 0; row < counts[thread]; row += tile_rows, tiles++) {
                lists.tile_expert[tiles] = thread;
                lists.tile_first[tiles] = pairs + row;
            }
        }
    }
    __syncthreads();
    for (uint32_t expert = warp; expert < experts; expert += GROUP_WARPS) {
        uint32_t next = starts[expert];
        for (uint32_t from = 0; from < there; from += 32) {
            const uint32_t token = from + lane;
            const float weight = token < there ? logits[(size_t)token * experts + expert] : 0.0f;
            const uint32_t votes = __ballot_sync(~0u, weight != 0.0f);
            if (weight != 0.0f) {
                const uint32_t pair = next + before(votes),
                               adapter = token_adapter ? token_adapter[token] : NONE;
                lists.pair_token[pair] = token;
                lists.pair_expert[pair] = expert;
                lists.pair_weight[pair] = weight;
                lists.pair_adapter[pair] = adapter < adapters ? expert * adapters + adapter : NONE;
                for (uint32_t i = 0; i < chosen; i++)
                    if (lists.token_expert[(size_t)token * chosen + i] == expert)
                        lists.token_pair[(size_t)token * chosen + i] = pair;
            }
            next += __popc(votes);
        }
    }
}

// Gathers rows of `width`, a multiple of 8, for experts_gemm.cu.
template <class T>
__device__ __forceinline__ void take(const Lists& lists, const float* x, T* out, uint32_t width) {
    pdl_launch();
    pdl_wait();
    if (blockIdx.x >= lists.count[0]) return;
    const float4* from =
        reinterpret_cast<const float4*>(x + (size_t)lists.pair_token[blockIdx.x] * width);
    uint4* to = reinterpret_cast<uint4*>(out + (size_t)blockIdx.x * width);
    for (uint32_t i = threadIdx.x; i < width / 8; i += blockDim.x) {
        const float4 a = from[2 * i], b = from[2 * i + 1];
        to[i] =
            make_uint4(pack<T>(a.x, a.y), pack<T>(a.z, a.w), pack<T>(b.x, b.y), pack<T>(b.z, b.w));
    }
}

template <class T>
__device__ __forceinline__ void combine(const Lists& lists, const float* x, float* out,
                                        uint32_t chosen, uint32_t width) {
    pdl_launch();
    pdl_wait();
    const uint32_t token = blockIdx.x;
    const uint32_t* pairs = lists.token_pair + (size_t)token * chosen;
    const uint32_t first = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    out += (size_t)token * width;
    if (width % 4 == 0 && first < width) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (uint32_t i = 0; i < chosen && pairs[i] != NONE; i++) {
            const float4 v = *reinterpret_cast<const float4*>(x + (size_t)pairs[i] * width + first);
            const float weight = lists.pair_weight[pairs[i]];
            sum.x = shared_in<T>(sum.x, weight, v.x);
            sum.y = shared_in<T>(sum.y, weight, v.y);
            sum.z = shared_in<T>(sum.z, weight, v.z);
            sum.w = shared_in<T>(sum.w, weight, v.w);
        }
        *reinterpret_cast<float4*>(out + first) = sum;
    } else {
        for (uint32_t at = first; at < min(first + 4, width); at++) {
            float sum = 0.0f;
            for (uint32_t i = 0; i < chosen && pairs[i] != NONE; i++)
                sum = shared_in<T>(sum, lists.pair_weight[pairs[i]],
                                   x[(size_t)pairs[i] * width + at]);
            out[at] = sum;
        }
    }
}

#define EXPERTS_KERNELS(T)                                                                         \
    extern "C" __global__ void __launch_bounds__(GROUP_WARPS * 32) experts_group_##T(              \
        float* logits /* [tokens, experts] */, uint32_t* words,                                    \
        const uint32_t* batch /* or null */, const uint32_t* token_adapter /* [tokens] or null */, \
        uint32_t tokens, uint32_t chosen, uint32_t experts, uint32_t adapters, uint32_t tile_rows, \
        uint32_t is_routed) {                                                                      \
        group<T>(logits, words, batch, token_adapter, tokens, chosen, experts, adapters,           \
                 tile_rows, is_routed);                                                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) experts_combine_##T(                         \
        uint32_t* words, uint32_t tokens, uint32_t chosen, uint32_t experts,                       \
        const float* x /* [pairs, width] */, float* out /* [tokens, width] */, uint32_t width) {   \
        combine<T>(lists_of(words, tokens, chosen, experts), x, out, chosen, width);               \
    }
EXPERTS_KERNELS(f32)
EXPERTS_KERNELS(bf16)
EXPERTS_KERNELS(f16)

#define EXPERTS_GATHER(T)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) experts_gather_##T(                          \
        uint32_t* words, uint32_t tokens, uint32_t chosen, uint32_t experts,                       \
        const float* x /* [tokens, width] */, T* out /* [pairs, width] */, uint32_t width) {       \
        take<T>(lists_of(words, tokens, chosen, experts), x, out, width);                          \
    }
EXPERTS_GATHER(bf16)
EXPERTS_GATHER(f16)

// `which` names the matrix of each expert; x has rows of tokens or of pairs.
#define EXPERTS_GENERIC(F, f, T)                                                                   \
    extern "C" __global__ void __launch_bounds__(256) experts_generic_##f##_##T(                   \
        EXPERTS, const float* x, float* out /* [pairs, outputs] */, uint32_t which,                \
        uint32_t layout, uint32_t by_token, uint32_t outputs, uint32_t inputs) {                   \
        const Lists lists = lists_of(words, tokens, chosen, experts);                              \
        const uint32_t pair = blockIdx.x, output = blockIdx.y * 8 + threadIdx.x / 32;              \
        if (pair >= lists.count[0] || output >= outputs) return;                                   \
        const size_t row = by_token ? lists.pair_token[pair] : pair;                               \
        const uint8_t* weight =                                                                    \
            reinterpret_cast<const uint8_t*>(matrices[lists.pair_expert[pair] * 3 + which]);       \
        linear_generic<F, T>(weight, layout, x + row * inputs, nullptr,                            \
                             out + (size_t)pair * outputs, output, outputs, inputs, 1);            \
    }
#define EXPERTS_GENERIC_DTYPES(F, f)                                                               \
    EXPERTS_GENERIC(F, f, f32) EXPERTS_GENERIC(F, f, bf16) EXPERTS_GENERIC(F, f, f16)
EXPERTS_GENERIC_DTYPES(Plain, plain)
EXPERTS_GENERIC_DTYPES(Int8, int8)
EXPERTS_GENERIC_DTYPES(Nf4, nf4)
