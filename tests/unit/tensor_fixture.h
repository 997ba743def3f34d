/* tensor_fixture.h - a small tensor of two kv heads with 32 channels, and a plain copy of all rows
 * that were written to it. */
#ifndef KVANT_TESTS_TENSOR_FIXTURE_H
#define KVANT_TESTS_TENSOR_FIXTURE_H

#include "testing.h"

#include <kvant/tensor_hooks.h>

enum { N_KV_HEADS = 2, HEAD_DIM = 32, WIDTH = N_KV_HEADS * HEAD_DIM };

typedef struct fixture {
    kvant_codec *owned[N_KV_HEADS];
    const kvant_codec *codecs[N_KV_HEADS];
    /* params.codecs is set where params is used, because fixtures are copied */
    kvant_tensor_params params;
    kvant_tensor *tensor;
    void *memory;
    size_t bytes;
    float *rows; /* the row that was written last to every slot */
} fixture;

static inline kvant_tensor_params params_of(const fixture *f)
{
    kvant_tensor_params params = f->params;
    params.codecs = f->codecs;
    return params;
}

static inline void make_tensor(fixture *f)
{
    kvant_tensor_params params = params_of(f);
    if (kvant_tensor_size(&params, &f->bytes) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    f->memory = aligned(f->bytes);
    assert_int_equal(kvant_tensor_create(&params, f->memory, &f->tensor), KVANT_OK);
    f->rows = calloc((size_t)f->params.n_blocks * 64 * WIDTH, sizeof *f->rows);
    assert_non_null(f->rows);
}

static inline fixture make_heads(const char *first, const char *second, kvant_role role,
                                 uint32_t n_sequences, uint32_t blocks, uint32_t n_open)
{
    fixture f = { .owned = { make_codec(first, HEAD_DIM, role) } };
    f.owned[1] = strcmp(first, second) == 0 ? NULL : make_codec(second, HEAD_DIM, role);
    f.codecs[0] = f.owned[0];
    f.codecs[1] = f.owned[1] ? f.owned[1] : f.owned[0];
    f.params = (kvant_tensor_params){ .size = sizeof f.params,
                                      .n_kv_heads = N_KV_HEADS,
                                      .n_sequences = n_sequences,
                                      .n_blocks = n_sequences * blocks,
                                      .blocks_per_sequence = blocks,
                                      .n_open_blocks = n_open };
    make_tensor(&f);
    return f;
}

/* blocks: the number of blocks of each sequence. */
static inline fixture make(const char *spec, uint32_t n_sequences, uint32_t blocks, uint32_t n_open)
{
    return make_heads(spec, spec, KVANT_ROLE_K, n_sequences, blocks, n_open);
}

/* Makes another tensor with the codecs that f owns. */
static inline fixture make_like(const fixture *f)
{
    fixture g = *f;
    g.owned[0] = g.owned[1] = NULL;
    make_tensor(&g);
    return g;
}

static inline void drop(fixture *f)
{
    kvant_tensor_free(&f->tensor);
    kvant_codec_free(&f->owned[0]);
    kvant_codec_free(&f->owned[1]);
    free(f->memory);
    free(f->rows);
}

/* Numbers that fp16 holds exactly, so that with rotate=none exact pages hold the rows
 * themselves. */
static inline float half_number(uint64_t *rng)
{
    return (float)((int)(test_random(rng) % 2049) - 1024) / 256;
}

static inline kvant_status try_write(fixture *f, uint32_t first, uint32_t n, const float *rows,
                                     uint32_t n_threads)
{
    int64_t *slots = malloc(n * sizeof *slots);
    for (uint32_t i = 0; i < n; i++)
        slots[i] = first + i;
    kvant_status status = kvant_tensor_write(f->tensor, slots, n, rows, WIDTH, n_threads);
    free(slots);
    return status;
}

/* Writes rows in batches to the slots from `first` on, and copies them to f->rows. */
static inline void write_rows(fixture *f, uint32_t first, uint32_t n, const float *rows,
                              uint32_t batch, uint32_t n_threads)
{
    memcpy(f->rows + (size_t)first * WIDTH, rows, (size_t)n * WIDTH * sizeof *rows);
    for (uint32_t i = 0; i < n; i += batch)
        assert_ok(try_write(f, first + i, n - i < batch ? n - i : batch, rows + (size_t)i * WIDTH,
                            n_threads));
}

static inline void write_range(fixture *f, uint32_t first, uint32_t n, uint32_t batch,
                               uint32_t n_threads, uint64_t *rng)
{
    float *rows = malloc((size_t)n * WIDTH * sizeof *rows);
    for (size_t j = 0; j < (size_t)n * WIDTH; j++)
        rows[j] = half_number(rng);
    write_rows(f, first, n, rows, batch, n_threads);
    free(rows);
}

static inline kvant_block_info block_of(const fixture *f, uint32_t block, uint32_t kv_head)
{
    kvant_block_info info = { .size = sizeof info };
    assert_int_equal(kvant_tensor_get_block(f->tensor, block, kv_head, &info), KVANT_OK);
    return info;
}

/* The first n blocks of both tensors have the same pages. The page of block 0 is fp16, because
 * block 0 is a sink. */
static inline void assert_same_pages(const fixture *a, const fixture *b, uint32_t n)
{
    for (uint32_t block = 0; block < n; block++)
        for (uint32_t h = 0; h < N_KV_HEADS; h++)
            assert_memory_equal(block_of(a, block, h).page, block_of(b, block, h).page,
                                block ? info_of(a->codecs[h]).page_bytes : 64 * HEAD_DIM * 2);
}

static inline kvant_tensor_info tensor_info_of(const fixture *f)
{
    kvant_tensor_info info = { .size = sizeof info };
    assert_int_equal(kvant_tensor_get_info(f->tensor, &info), KVANT_OK);
    return info;
}

static inline bool is_open(const fixture *f, uint32_t block)
{
    kvant_block_state state = block_of(f, block, 0).state;
    return state == KVANT_BLOCK_OPEN || state == KVANT_BLOCK_SINK;
}

static inline void read_slot(const fixture *f, uint32_t slot, float *row)
{
    assert_int_equal(kvant_tensor_read(f->tensor, slot, 1, row, WIDTH), KVANT_OK);
}

/* Encodes and decodes a row with a codec that needs no other tokens. */
static inline void through_codec(const fixture *f, const float *row, float *out)
{
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        void *page = aligned(info_of(f->codecs[h]).page_bytes);
        assert_ok(kvant_codec_encode(f->codecs[h], NULL, row + h * HEAD_DIM, HEAD_DIM, 0, 1, page));
        assert_ok(kvant_codec_decode(f->codecs[h], NULL, page, 0, 1, out + h * HEAD_DIM, 0));
        free(page);
    }
}

/* Slots of exact blocks hold the rows; slots of sealed blocks hold the rows as the codec decodes
 * them. */
static inline void check_slots(const fixture *f, uint32_t first, uint32_t n)
{
    float got[WIDTH], want[WIDTH];
    for (uint32_t slot = first; slot < first + n; slot++) {
        const float *row = f->rows + (size_t)slot * WIDTH;
        read_slot(f, slot, got);
        if (is_open(f, slot / 64))
            assert_memory_equal(got, row, sizeof got);
        else {
            through_codec(f, row, want);
            assert_memory_equal(got, want, sizeof got);
        }
    }
}

/* Root of the mean squared error per number over the slots. */
static inline double error_of(const fixture *f, uint32_t first, uint32_t n)
{
    float got[WIDTH];
    double sum = 0;
    for (uint32_t slot = first; slot < first + n; slot++) {
        read_slot(f, slot, got);
        sum += squared_distance(got, f->rows + (size_t)slot * WIDTH, WIDTH);
    }
    return sqrt(sum / ((double)n * WIDTH));
}

/* A block as exported bytes. */
typedef struct exported {
    uint8_t *data;
    size_t bytes;
} exported;

static inline exported export_block(const fixture *f, uint32_t block)
{
    size_t most = kvant_tensor_export_size(f->tensor);
    exported e = { malloc(most), 0 };
    assert_int_equal(kvant_tensor_export(f->tensor, block, e.data, most, &e.bytes), KVANT_OK);
    assert_true(e.bytes <= most);
    return e;
}

/* Everything that a caller can see of two tensors is equal: states, numbers of transforms, pages,
 * rows, counts. */
static inline void assert_alike(const fixture *a, const fixture *b)
{
    kvant_tensor_info x = tensor_info_of(a), y = tensor_info_of(b);
    assert_memory_equal(&x, &y, sizeof x);
    for (uint32_t block = 0; block < a->params.n_blocks; block++) {
        assert_int_equal(block_of(a, block, 0).state, block_of(b, block, 0).state);
        assert_int_equal(block_of(a, block, 0).transform_id, block_of(b, block, 0).transform_id);
        exported p = export_block(a, block), q = export_block(b, block);
        assert_int_equal(p.bytes, q.bytes);
        assert_memory_equal(p.data, q.data, p.bytes);
        free(p.data);
        free(q.data);
    }
}

#endif
