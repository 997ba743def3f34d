/* test_lesson.c - kvant_tensor_learn (tensor_hooks.h): a tensor that stores no rows learns the same
 * transforms as a tensor that stores them. */
#include "testing.h"

#include <kvant/cuda.h>
#include <kvant/tensor_hooks.h>

enum { HEAD_DIM = 64, N_KV_HEADS = 2, WIDTH = HEAD_DIM * N_KV_HEADS, ROWS = 512, BLOCKS = 9 };

static const char spec[] = "int-8:transform=first,rotate=none,sink=4";
static float frequencies[HEAD_DIM / 2], rows[2 * ROWS * WIDTH], queries[64 * 2 * WIDTH];

typedef struct fixture {
    kvant_codec *codec;
    kvant_tensor *tensor;
    void *memory;
} fixture;

static fixture make(void)
{
    fixture f = { .codec = make_codec(spec, HEAD_DIM, KVANT_ROLE_K) };
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = (const kvant_codec *[]){ f.codec, f.codec },
                                         .n_kv_heads = N_KV_HEADS,
                                         .n_sequences = 1,
                                         .n_blocks = BLOCKS };
    const kvant_rope rope = { .size = sizeof rope,
                              .n_dims = HEAD_DIM,
                              .frequencies = frequencies,
                              .n_positions = 3072,
                              .n_position_transforms = 1,
                              .block_centers = 1 };
    size_t bytes;
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    bytes = (bytes + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN;
    f.memory = aligned_alloc(KVANT_PAGE_ALIGN, bytes);
    assert_non_null(f.memory);
    memset(f.memory, 0, bytes);
    assert_int_equal(kvant_tensor_create(&params, f.memory, &f.tensor), KVANT_OK);
    assert_int_equal(kvant_tensor_set_rope(f.tensor, &rope), KVANT_OK);
    return f;
}

static void drop(fixture *f)
{
    kvant_tensor_free(&f->tensor);
    kvant_codec_free(&f->codec);
    free(f->memory);
}

/* The next n rows from the first-th on. Tokens of the sink go to block 0, as gpu/learner.c has
 * it. */
static kvant_status take(const fixture *f, size_t first, size_t n, bool stores)
{
    int64_t slots[ROWS], at = KVANT_PAGE_TOKENS;
    int32_t positions[ROWS];
    for (size_t i = 0; i < n; i++) {
        positions[i] = (int32_t)(first + i);
        slots[i] = positions[i] < 4 ? (int64_t)i : at++;
    }
    assert_int_equal(kvant_tensor_next_positions(f->tensor, positions, n), KVANT_OK);
    return (stores ? kvant_tensor_write : kvant_tensor_learn)(f->tensor, slots, n,
                                                              rows + first * WIDTH, WIDTH, 1);
}

static void ask(const fixture *f)
{
    int32_t positions[64];
    const kvant_queries q = { .size = sizeof q,
                              .q = queries,
                              .token_stride = (size_t)2 * WIDTH,
                              .head_stride = HEAD_DIM,
                              .n_tokens = 64,
                              .n_heads = 2 * N_KV_HEADS,
                              .positions = positions };
    for (int i = 0; i < 64; i++)
        positions[i] = 8 * i;
    assert_int_equal(kvant_tensor_note_queries(f->tensor, &q, 1), KVANT_OK);
}

/* Centres at position 0, and W with its inverse, of both tensors' block 1. */
static void check_equal(const fixture *a, const fixture *b, uint32_t head)
{
    kvant_block_info info[2] = { { .size = sizeof info[0] }, { .size = sizeof info[1] } };
    kvant_cuda_tables tables[2] = { { .size = sizeof tables[0] }, { .size = sizeof tables[1] } };
    kvant_codec *made[2];
    const size_t square = (size_t)HEAD_DIM * HEAD_DIM * sizeof(float);
    for (int i = 0; i < 2; i++) {
        const kvant_tensor *tensor = i ? b->tensor : a->tensor;
        assert_int_equal(kvant_tensor_get_block(tensor, 1, head, &info[i]), KVANT_OK);
        assert_int_equal(kvant_tensor_make_codec(tensor, 1, head, a->codec, &made[i]), KVANT_OK);
        assert_int_equal(kvant_cuda_codec_tables(made[i], &tables[i]), KVANT_OK);
        assert_non_null(info[i].start);
        assert_int_equal(tables[i].key_transform_size, HEAD_DIM * HEAD_DIM);
    }
    assert_memory_equal(info[0].start, info[1].start, HEAD_DIM * sizeof(float));
    assert_memory_equal(tables[0].center, tables[1].center, HEAD_DIM * sizeof(float));
    assert_memory_equal(tables[0].key_transform, tables[1].key_transform, square);
    assert_memory_equal(tables[0].inverse_key_transform, tables[1].inverse_key_transform, square);
    for (int i = 0; i < 2; i++)
        kvant_codec_free(&made[i]);
}

CASE(a_tensor_learns_the_same_without_storing)
{
    fixture stored = make(), learned = make();
    ask(&stored);
    ask(&learned);
    for (size_t part = 0; part < 2; part++) {
        assert_int_equal(take(&stored, part * ROWS, ROWS, true), KVANT_OK);
        assert_int_equal(take(&learned, part * ROWS, ROWS, false), KVANT_OK);
        for (uint32_t head = 0; head < N_KV_HEADS; head++)
            check_equal(&stored, &learned, head);
    }
    drop(&stored);
    drop(&learned);
}

/* After rows that are no numbers, the tensor learns as a new one does. */
CASE(refused_rows_teach_nothing)
{
    fixture fresh = make(), other = make();
    const float former = rows[100 * WIDTH];
    assert_int_equal(take(&other, 0, 63, false), KVANT_ERR_ARGUMENT);
    rows[100 * WIDTH] = NAN;
    assert_int_equal(take(&other, 0, ROWS, false), KVANT_ERR_NONFINITE);
    rows[100 * WIDTH] = former;
    ask(&fresh);
    ask(&other);
    assert_int_equal(take(&fresh, 0, ROWS, false), KVANT_OK);
    assert_int_equal(take(&other, 0, ROWS, false), KVANT_OK);
    for (uint32_t head = 0; head < N_KV_HEADS; head++)
        check_equal(&fresh, &other, head);
    drop(&fresh);
    drop(&other);
}

static int start(void **state)
{
    uint64_t rng = 7;
    float scale[HEAD_DIM];
    for (int i = 0; i < HEAD_DIM / 2; i++)
        frequencies[i] = powf(10000, -2.0f * (float)i / HEAD_DIM);
    fill_normal(scale, HEAD_DIM, &rng);
    fill_normal(rows, sizeof rows / sizeof *rows, &rng);
    fill_normal(queries, sizeof queries / sizeof *queries, &rng);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        rows[i] *= expf(scale[i % HEAD_DIM]);
    return 0;
}

RUN_CASES(start, NULL)
