// Gradient of attention, generic fallback: f32 pages, and head dimensions that attention_grad.cu
//   does not support. P = softmax of the scores; dP = dO V^T; dS = P (dP - sum of dP P) dq = dS K /
//   divisor; dk += dS^T q / divisor; dv += P^T dO
// dk and dv are summed over the query heads of a kv head.
//
// Shapes: as attention_grad.cu; everything but the pages is f32. Limits: head_dim up to 256.
// Reference: kernels/src/ops/attention_grad.rs.
// attention_grad_generic_queries: grid heads x tokens, 4 warps; thread t takes keys t, t + 128, ...
//   It writes the maximum, 1 / sum of the weights and the sum of dP P of each token and head to
//   `stats`, and dq, 32 keys at a time, one dimension per thread.
// attention_grad_generic_keys: grid positions x kv heads x rows, one warp. For each query that sees
//   the position, from the last token to the first and over the heads of the group, the lanes
//   compute weight and dS together, then add to their dimensions. So every element of dk and dv has
//   one order of additions, wherever a sequence is cut.
// Traffic: keys and values once per query; 8 D operations per pair. Not meant for shapes that are
//   served often.
// expects attention_grad_generic_*: no LDL STL
#include "pages.cuh"

// Shared memory of attention_grad_generic_queries, f32: the query and its gradient [head_dim],
// 4 x 32 sums, 128 score gradients.
EXPORT(SHARED_BASE, (4 * 32 + 128) * 4);
EXPORT(SHARED_PER_DIM, 2 * 4);

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define WARPS            4
#define EXPERTS_PER_LANE 8

// Parameters that both kernels share.
template <class T> struct Call {
    const T* pages;
    const float* slopes;
    uint32_t kv_heads, group, head_dim;
    float inverse_divisor, alibi_scale;
    uint32_t window;

    __device__ __forceinline__ float bias(uint32_t head, uint32_t position) const {
        return alibi_scale == 0.0f
                   ? 0.0f
                   : alibi_scale * rounded<T>(__fmul_rn(slopes[head], (float)position));
    }
    __device__ __forceinline__ const T* vector(const uint32_t* table, uint32_t kv_head,
                                               uint32_t half, uint32_t position) const {
        return pages + vector_at(table[position / PAGE_TOKENS], kv_heads, kv_head, half, position,
                                 head_dim);
    }
};

template <class T> __device__ __forceinline__ float dot(const float* a, const T* b, uint32_t n) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < n; i++) sum = __fmaf_rn(a[i], widen(b[i]), sum);
    return sum;
}

template <class T>
__device__ __forceinline__ void queries(const Call<T>& call, const float* q, const float* grad,
                                        const uint32_t* words, float* q_grad, float* stats) {
    SMEM_DYN(shared);
    const uint32_t dim = call.head_dim, head = blockIdx.x, token = blockIdx.y, heads = gridDim.x,
                   kv_head = head / call.group;
    float *query = reinterpret_cast<float*>(shared), *given = query + dim, *scratch = given + dim,
          *score_grads = scratch + 128;
    const Batch batch = batch_of(words);
    const uint32_t position = batch.token_position[token],
                   first = position + 1 > call.window ? position + 1 - call.window : 0;
    const uint32_t* table = batch.pages + batch.row_table[batch.token_row[token]];
    const size_t place = ((size_t)token * heads + head) * dim;
    for (uint32_t i = threadIdx.x; i < dim; i += blockDim.x) {
        query[i] = q[place + i];
        given[i] = grad[place + i];
    }
    __syncthreads();
    auto score = [&](uint32_t p) {
        return dot(query, call.vector(table, kv_head, 0, p), dim) * call.inverse_divisor +
               call.bias(head, p);
    };
    float top = -INFINITY;
    for (uint32_t p = first + threadIdx.x; p <= position; p += blockDim.x)
        top = fmaxf(top, score(p));
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = top;
    __syncthreads();
    top = warp_max(threadIdx.x % 32 < WARPS ? scratch[threadIdx.x % 32] : -INFINITY);
    float total = 0.0f, mean = 0.0f;
    for (uint32_t p = first + threadIdx.x; p <= position; p += blockDim.x) {
        const float weight = expf(score(p) - top);
        total += weight;
        mean += weight * dot(given, call.vector(table, kv_head, 1, p), dim);
    }
    total = cta_sum(total, scratch + 32);
    const float share = __fdividef(1.0f, total);
    mean = cta_sum(mean, scratch + 64) * share;
    if (threadIdx.x == 0) {
        float* of = stats + ((size_t)token * heads + head) * 3;
        of[0] = top;
        of[1] = share;
        of[2] = mean;
    }
    float sum[2] = {}; // of dimensions t and t + 128
    for (uint32_t from = first; from <= position; from += WARPS * 32) {
        const uint32_t p = from + threadIdx.x;
        __syncthreads();
        if (p <= position) {
            const float weight = expf(score(p) - top) * share;
            score_grads[threadIdx.x] = weight *
                                       (dot(given, call.vector(table, kv_head, 1, p), dim) - mean) *
                                       call.inverse_divisor;
        }
        __syncthreads();
        const uint32_t count = min(position + 1 - from, (uint32_t)(WARPS * 32));
        for (uint32_t k = 0; k < count; k++) {
            const T* key = call.vector(table, kv_head, 0, from + k);
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
                if (threadIdx.x + 128 * j < dim)
                    sum[j] = __fmaf_rn(score_grads[k], widen(key[threadIdx.x + 128 * j]), sum[j]);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
        if (threadIdx.x + 128 * j < dim) q_grad[place + threadIdx.x + 128 * j] = sum[j];
}

template <class T>
__device__ __forceinline__ void keys(const Call<T>& call, const float* q, const float* grad,
                                     const uint32_t* words, const uint32_t* starts,
                                     const float* stats, float* k_grad, float* v_grad) {
    const Batch batch = batch_of(words);
    const uint32_t lane = threadIdx.x % 32, position = blockIdx.x, kv_head = blockIdx.y,
                   row = blockIdx.z;
    const uint32_t dim = call.head_dim, prefix = batch.row_prefix[row],
                   begin = batch.row_start[row], tokens = batch.row_start[row + 1] - begin;
    const uint32_t heads = call.kv_heads * call.group;
    if (position >= prefix + tokens) return;
    const uint32_t* table = batch.pages + batch.row_table[row];
    const T *stored_key = call.vector(table, kv_head, 0, position),
            *stored_value = call.vector(table, kv_head, 1, position);
    const size_t place = ((size_t)(starts[row] + position) * call.kv_heads + kv_head) * dim;
    float key[EXPERTS_PER_LANE], value[EXPERTS_PER_LANE], dk[EXPERTS_PER_LANE],
        dv[EXPERTS_PER_LANE];
#pragma unroll
    for (int j = 0; j < EXPERTS_PER_LANE; j++) {
        const uint32_t i = lane + 32 * j;
        key[j] = i < dim ? widen(stored_key[i]) : 0.0f;
        value[j] = i < dim ? widen(stored_value[i]) : 0.0f;
        dk[j] = i < dim ? k_grad[place + i] : 0.0f;
        dv[j] = i < dim ? v_grad[place + i] : 0.0f;
    }
    const uint32_t nearest =
        position > prefix ? position - prefix : 0; // first token that sees this position
    // Tokens from `nearest` on whose window reaches this position.
    const uint64_t farthest = (uint64_t)position + call.window;
    const uint32_t until = farthest < (uint64_t)prefix + tokens
                               ? (farthest > prefix ? (uint32_t)(farthest - prefix) : 0)
                               : tokens;
    for (uint32_t token = until; token-- > nearest;) {
        for (uint32_t h = 0; h < call.group; h++) {
            const uint32_t head = kv_head * call.group + h;
            const size_t at = (size_t)(begin + token) * heads + head;
            const float *query = q + at * dim, *given = grad + at * dim, *of = stats + at * 3;
            float score = 0.0f, slope = 0.0f, from_query[EXPERTS_PER_LANE],
                  from_grad[EXPERTS_PER_LANE];
#pragma unroll
            for (int j = 0; j < EXPERTS_PER_LANE; j++) {
                const uint32_t i = lane + 32 * j;
                from_query[j] = i < dim ? query[i] : 0.0f;
                from_grad[j] = i < dim ? given[i] : 0.0f;
                score = __fmaf_rn(from_query[j], key[j], score);
                slope = __fmaf_rn(from_grad[j], value[j], slope);
            }
            score = warp_sum(score) * call.inverse_divisor + call.bias(head, position);
            const float weight = expf(score - of[0]) * of[1];
            const float change = weight * (warp_sum(slope) - of[2]) * call.inverse_divisor;
#pragma unroll
            for (int j = 0; j < EXPERTS_PER_LANE; j++) {
                dk[j] = __fmaf_rn(change, from_query[j], dk[j]);
                dv[j] = __fmaf_rn(weight, from_grad[j], dv[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < EXPERTS_PER_LANE; j++) {
        const uint32_t i = lane + 32 * j;
        if (i < dim) {
            k_grad[place + i] = dk[j];
            v_grad[place + i] = dv[j];
        }
    }
}

#define ATTENTION_GRAD_GENERIC(T)                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) attention_grad_generic_queries_##T(   \
        const float* __restrict__ q /* [tokens, heads, head_dim] */,                               \
        const float* __restrict__ grad /* as q */, const T* __restrict__ pages,                    \
        const uint32_t* __restrict__ batch,                                                        \
        const float* __restrict__ slopes /* [heads] or null */,                                    \
        float* __restrict__ q_grad /* as q */, float* __restrict__ stats /* [tokens, heads, 3] */, \
        uint32_t kv_heads, uint32_t group, uint32_t head_dim, float inverse_divisor,               \
        float alibi_scale, uint32_t window) {                                                      \
        queries<T>(                                                                                \
            {pages, slopes, kv_heads, group, head_dim, inverse_divisor, alibi_scale, window}, q,   \
            grad, batch, q_grad, stats);                                                           \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(32) attention_grad_generic_keys_##T(              \
        const float* __restrict__ q /* [tokens, heads, head_dim] */,                               \
        const float* __restrict__ grad /* as q */, const T* __restrict__ pages,                    \
        const uint32_t* __restrict__ batch,                                                        \
        const float* __restrict__ slopes /* [heads] or null */,                                    \
        const uint32_t* __restrict__ starts /* [rows] */,                                          \
        const float* __restrict__ stats /* [tokens, heads, 3] */,                                  \
        float* __restrict__ k_grad /* [positions, kv_heads, head_dim] */,                          \
        float* __restrict__ v_grad /* as k_grad */, uint32_t kv_heads, uint32_t group,             \
        uint32_t head_dim, float inverse_divisor, float alibi_scale, uint32_t window) {            \
        keys<T>({pages, slopes, kv_heads, group, head_dim, inverse_divisor, alibi_scale, window},  \
                q, grad, batch, starts, stats, k_grad, v_grad);                                    \
    }
ATTENTION_GRAD_GENERIC(f32)
ATTENTION_GRAD_GENERIC(bf16)
ATTENTION_GRAD_GENERIC(f16)
