// llama.cpp's matrix product as a peer of the operations: reads `FORMAT OUTPUTS INPUTS ROWS` a line, computes it with ggml's CPU
// backend, and answers with nanoseconds. Weights are walked in a ring larger than the caches.
//
//     gcc -O2 ggml_ops.c -I GGML/include -L LIBS -lggml-cpu -lggml-base -Wl,-rpath,LIBS -o ggml_ops
//
// with ggml built for this machine (GGML_NATIVE=ON, GGML_OPENMP=OFF). Started by the bench with the number of threads. With one
// thread the clock is the CPU time of the thread, as in the bench: what other processes take away is not counted.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-cpu.h"
#include "ggml.h"

#define RING_BYTES ((size_t) 384 << 20)
#define REPEATS 3
// Of nodes and plans, not of data.
#define MAX_TENSORS 4096

static int64_t now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static enum ggml_type format(const char *name) {
    if (!strcmp(name, "bf16")) return GGML_TYPE_BF16;
    if (!strcmp(name, "q8_0")) return GGML_TYPE_Q8_0;
    if (!strcmp(name, "q4_0")) return GGML_TYPE_Q4_0;
    return GGML_TYPE_F32;
}

int main(int count, char **arguments) {
    int threads = count > 1 ? atoi(arguments[1]) : 1;
    clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    ggml_cpu_init();
    struct ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    struct ggml_threadpool *pool = ggml_threadpool_new(&params);
    uint8_t *ring = aligned_alloc(64, RING_BYTES);
    if (!pool || !ring) return 1;
    // Small bfloat16 numbers, or scales and codes that make finite ones.
    for (size_t i = 0; i < RING_BYTES / 2; i++) ((uint16_t *) ring)[i] = 0x2c00 | i % 251;
    printf("ggml %s\n", ggml_version());
    fflush(stdout);
    char name[16];
    long outputs, inputs, rows;
    size_t place = 0;
    while (scanf("%15s %ld %ld %ld", name, &outputs, &inputs, &rows) == 4) {
        enum ggml_type type = format(name);
        size_t bytes = ggml_row_size(type, inputs) * outputs;
        if (bytes > RING_BYTES) return 1;
        struct ggml_init_params init = {MAX_TENSORS * ggml_tensor_overhead() + ggml_graph_overhead(), NULL, true};
        struct ggml_context *context = ggml_init(init);
        struct ggml_tensor *weight = ggml_new_tensor_2d(context, type, inputs, outputs);
        struct ggml_tensor *x = ggml_new_tensor_2d(context, GGML_TYPE_F32, inputs, rows);
        struct ggml_tensor *product = ggml_mul_mat(context, weight, x);
        x->data = aligned_alloc(64, (ggml_nbytes(x) + 63) / 64 * 64);
        product->data = aligned_alloc(64, (ggml_nbytes(product) + 63) / 64 * 64);
        for (long i = 0; i < inputs * rows; i++) ((float *) x->data)[i] = 0.5f;
        struct ggml_cgraph *graph = ggml_new_graph(context);
        ggml_build_forward_expand(graph, product);
        struct ggml_cplan plan = ggml_graph_plan(graph, threads, pool);
        plan.work_data = malloc(plan.work_size + 64);
        int64_t best = INT64_MAX;
        for (int i = 0; i < REPEATS; i++) {
            if (place + bytes > RING_BYTES) place = 0;
            weight->data = ring + place;
            place += (bytes + 63) / 64 * 64;
            int64_t start = now(clock);
            if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) return 1;
            int64_t time = now(clock) - start;
            if (time < best) best = time;
        }
        printf("%lld\n", (long long) best);
        fflush(stdout);
        free(plan.work_data);
        free(x->data);
        free(product->data);
        ggml_free(context);
    }
    return 0;
}
