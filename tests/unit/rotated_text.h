/* rotated_text.h - keys and queries that RoPE rotates by their positions, and tensors that learn
 * from them. */
#ifndef KVANT_TESTS_ROTATED_TEXT_H
#define KVANT_TESTS_ROTATED_TEXT_H

#include "tensor_fixture.h"

#include "../../src/cache/learning.h"

enum {
    BLOCKS = 128,
    MOST = BLOCKS * 64,
    TEXT_GROUP = 2,
    TEXT_HEADS = TEXT_GROUP * N_KV_HEADS,
    PAIRS = HEAD_DIM / 2,
    BATCH = 512
};

static const char spec[] = "turboquant-4:transform=first";

typedef struct layout {
    uint32_t n_dims, interleaved, pairs[PAIRS][2]; /* pairs of channels that RoPE rotates */
} layout;

static inline const float *frequencies(void)
{
    static float f[PAIRS];
    for (uint32_t i = 0; i < PAIRS; i++)
        f[i] = powf(10000, -(float)i / PAIRS);
    return f;
}

static inline layout make_layout(uint32_t n_dims, uint32_t interleaved)
{
    layout l = { n_dims, interleaved, { { 0 } } };
    for (uint32_t i = 0; i < n_dims / 2; i++) {
        l.pairs[i][0] = interleaved ? 2 * i : i;
        l.pairs[i][1] = interleaved ? 2 * i + 1 : i + n_dims / 2;
    }
    return l;
}

static inline kvant_rope rope_of(const layout *l, uint32_t n_positions,
                                 uint32_t n_position_transforms)
{
    return (kvant_rope){ .size = sizeof(kvant_rope),
                         .n_dims = l->n_dims,
                         .interleaved = l->interleaved,
                         .frequencies = frequencies(),
                         .n_positions = n_positions,
                         .n_position_transforms = n_position_transforms };
}

/* Rotates a head by RoPE, as a model does. */
static inline void rotate_by_rope(const layout *l, double position, double *x)
{
    for (uint32_t i = 0; i < l->n_dims / 2; i++) {
        const double angle = position * frequencies()[i], a = x[l->pairs[i][0]],
                     b = x[l->pairs[i][1]];
        x[l->pairs[i][0]] = a * cos(angle) - b * sin(angle);
        x[l->pairs[i][1]] = a * sin(angle) + b * cos(angle);
    }
}

static inline const layout *layouts(void)
{
    static layout all[4];
    all[0] = make_layout(HEAD_DIM, 0);
    all[1] = make_layout(HEAD_DIM, 1);
    all[2] = make_layout(12, 0);
    all[3] = make_layout(12, 1);
    return all;
}

static inline fixture make_rotated(const layout *l, uint32_t n_positions,
                                   uint32_t n_position_transforms)
{
    fixture f = make(spec, 1, BLOCKS, 0);
    const kvant_rope rope = rope_of(l, n_positions, n_position_transforms);
    assert_int_equal(kvant_tensor_set_rope(f.tensor, &rope), KVANT_OK);
    assert_non_null(f.tensor->learning->rope);
    return f;
}

/* A text: vectors with correlated channels, rotated by RoPE to their positions. */

typedef struct text {
    float rows[MOST * WIDTH], queries[MOST * TEXT_HEADS * HEAD_DIM];
} text;

static inline void fill(const layout *l, float constant, uint32_t n_heads, uint64_t *rng,
                        float *out)
{
    double matrix[HEAD_DIM * HEAD_DIM], center[HEAD_DIM];
    for (uint32_t i = 0; i < HEAD_DIM * HEAD_DIM; i++)
        matrix[i] = test_normal(rng);
    for (uint32_t j = 0; j < HEAD_DIM; j++)
        center[j] = constant * test_normal(rng);
    for (size_t i = 0; i < (size_t)MOST * n_heads; i++) {
        double x[HEAD_DIM];
        memcpy(x, center, sizeof x);
        for (uint32_t k = 0; k < HEAD_DIM; k++) {
            const double latent = test_normal(rng) * exp2(-0.2 * k);
            for (uint32_t j = 0; j < HEAD_DIM; j++)
                x[j] += matrix[j * HEAD_DIM + k] * latent;
        }
        rotate_by_rope(l, (double)(i / n_heads), x);
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            out[i * HEAD_DIM + j] = (float)x[j];
    }
}

static inline text *make_text(const layout *l, uint64_t seed)
{
    text *t = malloc(sizeof *t);
    assert_non_null(t);
    fill(l, 5, N_KV_HEADS, &seed, t->rows);
    fill(l, 0, TEXT_HEADS, &seed, t->queries);
    return t;
}

/* Writes tokens to these slots, queries before rows. positions: whether the tensor gets the tokens'
 * positions or NULL. */
static inline void put(fixture *f, const text *t, const int64_t *slots, const int32_t *tokens,
                       uint32_t n, bool positions)
{
    float *rows = malloc((size_t)n * WIDTH * sizeof *rows),
          *queries = malloc((size_t)n * TEXT_HEADS * HEAD_DIM * sizeof *queries);
    for (uint32_t i = 0; i < n; i++) {
        memcpy(rows + (size_t)i * WIDTH, t->rows + (size_t)tokens[i] * WIDTH, WIDTH * sizeof *rows);
        memcpy(f->rows + (size_t)slots[i] * WIDTH, rows + (size_t)i * WIDTH, WIDTH * sizeof *rows);
        memcpy(queries + (size_t)i * TEXT_HEADS * HEAD_DIM,
               t->queries + (size_t)tokens[i] * TEXT_HEADS * HEAD_DIM,
               TEXT_HEADS * HEAD_DIM * sizeof *queries);
    }
    const kvant_queries q = { .size = sizeof q,
                              .q = queries,
                              .token_stride = (size_t)TEXT_HEADS * HEAD_DIM,
                              .head_stride = HEAD_DIM,
                              .n_tokens = n,
                              .n_heads = TEXT_HEADS,
                              .positions = positions ? tokens : NULL };
    assert_int_equal(kvant_tensor_note_queries(f->tensor, &q, 2), KVANT_OK);
    assert_ok(kvant_tensor_next_positions(f->tensor, positions ? tokens : NULL, positions ? n : 0));
    assert_int_equal(kvant_tensor_write(f->tensor, slots, n, rows, WIDTH, 2), KVANT_OK);
    free(rows);
    free(queries);
}

/* Writes tokens first .. end - 1 in batches. A token's slot is the token's number plus an
 * offset. */
static inline void put_all(fixture *f, const text *t, uint32_t first, uint32_t end, uint32_t batch,
                           int64_t moved)
{
    int64_t slots[BATCH];
    int32_t tokens[BATCH];
    for (uint32_t i = first; i < end; i += batch) {
        const uint32_t n = end - i < batch ? end - i : batch;
        for (uint32_t j = 0; j < n; j++) {
            tokens[j] = (int32_t)(i + j);
            slots[j] = i + j + moved;
        }
        put(f, t, slots, tokens, n, moved != 0 || first != 0);
    }
}

/* Root mean square error of the scores of tokens first .. end - 1 with queries near them. */
static inline double error_near(const fixture *f, const text *t, uint32_t first, uint32_t end,
                                int64_t moved)
{
    double sum = 0;
    for (uint32_t token = first; token < end; token += 3) {
        const uint32_t slot = (uint32_t)(token + moved);
        float got[WIDTH];
        read_slot(f, slot, got);
        for (uint32_t h = 0; h < TEXT_HEADS; h++) {
            const float *q =
                t->queries +
                ((size_t)(token + 7 < MOST ? token + 7 : token) * TEXT_HEADS + h) * HEAD_DIM;
            double error = 0;
            for (uint32_t j = 0, at = h / TEXT_GROUP * HEAD_DIM; j < HEAD_DIM; j++)
                error += (double)q[j] * (got[at + j] - f->rows[(size_t)slot * WIDTH + at + j]);
            sum += error * error;
        }
    }
    return sqrt(sum / ((end - first + 2) / 3 * TEXT_HEADS));
}

static inline void assert_same_block(const fixture *f, uint32_t a, const fixture *g, uint32_t b)
{
    exported x = export_block(f, a), y = export_block(g, b);
    assert_int_equal(x.bytes, y.bytes);
    assert_memory_equal(x.data, y.data, x.bytes);
    free(x.data);
    free(y.data);
}

#endif
