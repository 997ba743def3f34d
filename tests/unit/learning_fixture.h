/* learning_fixture.h - keys and queries with correlated channels, from which a tensor learns. */
#ifndef KVANT_TESTS_LEARNING_FIXTURE_H
#define KVANT_TESTS_LEARNING_FIXTURE_H

#include "tensor_fixture.h"

#include "../../src/base/fnv.h"
#include "../../src/cache/learning.h"
#include "../../src/cache/center.h"
#include "../../src/cache/key_transform.h"

enum { BLOCKS = 40, MOST = BLOCKS * 64, GROUP = 3, N_HEADS = GROUP * N_KV_HEADS, HEADER = 40 };

static const char spec[] = "turboquant-4:transform=first",
                  plain[] = "turboquant-4:center=first,norm=first";

/* Keys and queries with correlated channels: each is a fixed matrix times latent numbers of falling
 * size. Keys lie around a centre. */
typedef struct kind {
    float keys[HEAD_DIM * HEAD_DIM], queries[HEAD_DIM * HEAD_DIM], center[WIDTH];
} kind;

static inline kind make_kind(uint64_t seed)
{
    kind k;
    fill_normal(k.keys, COUNT(k.keys), &seed);
    fill_normal(k.queries, COUNT(k.queries), &seed);
    fill_normal(k.center, COUNT(k.center), &seed);
    for (uint32_t j = 0; j < WIDTH; j++)
        k.center[j] *= 20;
    return k;
}

static inline void fill(const float *matrix, const float *center, size_t n_heads, size_t n,
                        uint64_t *rng, float *out)
{
    for (size_t i = 0; i < n * n_heads; i++)
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            out[i * HEAD_DIM + j] = center ? center[i % n_heads * HEAD_DIM + j] : 0;
    for (size_t i = 0; i < n * n_heads; i++)
        for (uint32_t l = 0; l < HEAD_DIM; l++) {
            const float latent = test_normal(rng) * exp2f(-0.2f * (float)l);
            for (uint32_t j = 0; j < HEAD_DIM; j++)
                out[i * HEAD_DIM + j] += matrix[j * HEAD_DIM + l] * latent;
        }
}

typedef struct text {
    float rows[MOST * WIDTH], queries[MOST * N_HEADS * HEAD_DIM];
} text;

static inline text *make_text(const kind *k, uint64_t seed)
{
    text *t = malloc(sizeof *t);
    assert_non_null(t);
    fill(k->keys, k->center, N_KV_HEADS, MOST, &seed, t->rows);
    fill(k->queries, NULL, N_HEADS, MOST, &seed, t->queries);
    return t;
}

static inline void note(const fixture *f, const float *queries, uint32_t n, uint32_t n_threads)
{
    const kvant_queries q = { .size = sizeof q,
                              .q = queries,
                              .token_stride = (size_t)N_HEADS * HEAD_DIM,
                              .head_stride = HEAD_DIM,
                              .n_tokens = n,
                              .n_heads = N_HEADS };
    assert_int_equal(kvant_tensor_note_queries(f->tensor, &q, n_threads), KVANT_OK);
}

/* Writes tokens first .. first + n - 1 of the text to the slots of the same numbers, queries before
 * keys. */
static inline void put(fixture *f, const text *t, uint32_t first, uint32_t n, uint32_t batch,
                       uint32_t n_threads)
{
    for (uint32_t i = first; i < first + n; i += batch) {
        const uint32_t m = first + n - i < batch ? first + n - i : batch;
        note(f, t->queries + (size_t)i * N_HEADS * HEAD_DIM, m, n_threads);
        write_rows(f, i, m, t->rows + (size_t)i * WIDTH, m, n_threads);
    }
}

#endif
