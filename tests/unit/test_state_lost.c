/* test_state_lost.c - a saved run is restored into blocks that hold rows of other cells. These rows
 * cannot be stored again, or they belong to the sequence that the state replaces, or the same state
 * has restored them before. The linker lets a test refuse kvant_tensor_write. */
#include "testing.h"

#include "../../integrations/llama.cpp/host.h"
#include "state_mocks.h"

enum { HEAD = 32, CELLS = 200, BLOCKS = 4, FIRST = 10, RUN = 90 };

static struct fixture {
    kvp_kv kv;
    kvant_codec *owned;
    const kvant_codec *codec;
    void *memory;
    uint16_t state[RUN * HEAD];
} f;

static bool refuses;

kvant_status __real_kvant_tensor_write(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                       const float *rows, size_t stride, uint32_t n_threads);
kvant_status __wrap_kvant_tensor_write(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                       const float *rows, size_t stride, uint32_t n_threads);

kvant_status __wrap_kvant_tensor_write(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                       const float *rows, size_t stride, uint32_t n_threads)
{
    return refuses ? KVANT_ERR_MEMORY
                   : __real_kvant_tensor_write(tensor, slots, n, rows, stride, n_threads);
}

uint32_t kvp_kv_blocks(const kvp_kv_shape *shape)
{
    return BLOCKS;
}

const kvant_codec *const *kvp_kv_codecs(const kvp_kv *kv)
{
    return &f.codec;
}

kvant_status kvp_kv_assign_block(kvp_kv *kv, uint32_t block)
{
    return KVANT_OK;
}

void kvp_kv_store_rows(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows)
{
    (void)kv, (void)cells, (void)n, (void)rows;
    fail_msg("the run fits here, so no row is decoded");
}

bool kvp_restoring_refuse(const char *why)
{
    return false;
}

static void store(float offset)
{
    int64_t slots[CELLS];
    float rows[CELLS * HEAD];

    for (size_t i = 0; i < CELLS * HEAD; i++)
        rows[i] = offset + (float)(i % 17) - 8.0f;
    for (size_t i = 0; i < CELLS; i++)
        slots[i] = kvp_kv_slot(&f.kv, (int64_t)i);
    assert_int_equal(__real_kvant_tensor_write(f.kv.tensor, slots, CELLS, rows, HEAD, 1), KVANT_OK);
}

static void read_row(size_t cell, float row[HEAD])
{
    const int64_t slot = kvp_kv_slot(&f.kv, (int64_t)cell);

    assert_int_equal(kvant_tensor_read_slots(f.kv.tensor, &slot, 1, row, HEAD, 1), KVANT_OK);
}

static int start(void **state)
{
    kvant_tensor_params params = {
        .size = sizeof(params), .n_kv_heads = 1, .n_sequences = 1, .n_blocks = BLOCKS
    };
    char err[256];
    size_t bytes;

    memset(&f, 0, sizeof(f));
    assert_ok(
        kvant_codec_create("int-4", HEAD, KVANT_ROLE_K, TEST_SEED, &f.owned, err, sizeof(err)));
    f.codec = f.owned;
    params.codecs = &f.codec;
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    f.memory = kvant_os_alloc(KVANT_PAGE_ALIGN, bytes);
    assert_non_null(f.memory);
    memset(f.memory, 0, bytes);
    assert_int_equal(kvant_tensor_create(&params, f.memory, &f.kv.tensor), KVANT_OK);
    f.kv.shape = (kvp_kv_shape){ .row = HEAD, .n_cells = CELLS, .n_streams = 1 };
    f.kv.head_dim = HEAD;
    assert_true(kvp_invalid_create(&f.kv.invalid, CELLS));
    return 0;
}

static int stop(void **state)
{
    kvp_invalid_free(&f.kv.invalid);
    kvant_tensor_free(&f.kv.tensor);
    kvant_os_free(f.memory);
    kvant_codec_free(&f.owned);
    return 0;
}

/* Saves a run of cells whose first and last blocks have rows of other cells, and restores it over
 * other rows. */
static void save_and_restore(void)
{
    store(0.0f);
    assert_true(kvp_state_read(&f.kv, FIRST, RUN, f.state));
    store(5.0f);
    assert_int_equal(kvp_state_write(&f.kv, FIRST, f.state, sizeof(f.state), NULL),
                     sizeof(f.state));
}

CASE_BETWEEN(other_rows_stay, start, stop)
{
    float before[HEAD], own[HEAD], row[HEAD];

    store(5.0f);
    read_row(0, before);
    read_row(FIRST, own);
    refuses = false;
    save_and_restore();
    assert_int_equal(f.kv.invalid.n, 0);
    read_row(0, row);
    for (size_t i = 0; i < HEAD; i++)
        assert_float_equal(row[i], before[i], 2.0f); /* 16 levels of a range of 16: two steps */
    read_row(FIRST, row);
    for (size_t i = 0; i < HEAD; i++)
        assert_true(row[i] < own[i] - 1.0f); /* 5 less, and two steps */
}

CASE_BETWEEN(lost_rows_are_invalid, start, stop)
{
    refuses = true;
    save_and_restore();
    for (size_t cell = 0; cell < CELLS; cell++) {
        const bool restored = cell >= FIRST && cell < FIRST + RUN, /* in blocks 0 and 1 */
            other = !restored && cell < 2 * (size_t)KVANT_PAGE_TOKENS;
        if (kvp_invalid_has(&f.kv.invalid, cell) != other)
            fail_msg("cell %zu %s invalid", cell, other ? "is not" : "is");
    }
}

static void assert_row_near(size_t cell, size_t stored_as, float offset)
{
    float row[HEAD];

    read_row(cell, row);
    for (size_t i = 0; i < HEAD; i++)
        assert_float_equal(row[i], offset + (float)((stored_as * HEAD + i) % 17) - 8.0f, 2.0f);
}

static void write_run(size_t cell, const uint16_t *run, size_t n)
{
    kvp_state_begin(&f.kv, cell, n);
    assert_int_equal(kvp_state_write(&f.kv, cell, run, n * HEAD * sizeof(*run), NULL),
                     n * HEAD * sizeof(*run));
}

static uint64_t written(uint32_t block)
{
    kvant_block_info info = { .size = sizeof(info) };

    assert_int_equal(kvant_tensor_get_block(f.kv.tensor, block, 0, &info), KVANT_OK);
    return info.written;
}

/* The cells between two runs of a state were removed when it was saved, and llama.cpp restores the
 * runs next to each other. The second run has the slots of its block that follow the first run.
 * Rows of the replaced sequence go, the first run stays. */
CASE_BETWEEN(runs_of_a_state_share_a_block, start, stop)
{
    enum { N = 30, SECOND = 94, N_SECOND = 34 }; /* 94 = 64 + 30, 94 + 34 = 128 */
    static uint16_t first[N * HEAD], second[N_SECOND * HEAD];

    refuses = false;
    store(0.0f);
    assert_true(kvp_state_read(&f.kv, 0, N, first));
    assert_true(kvp_state_read(&f.kv, SECOND, N_SECOND, second));
    store(5.0f);
    mock_state = 1;
    write_run(0, first, N);
    assert_int_equal(written(0), ((uint64_t)1 << N) - 1);
    write_run(N, second, N_SECOND);
    mock_state = 0;
    assert_int_equal(f.kv.invalid.n, 0);
    for (size_t cell = 0; cell < N; cell++)
        assert_row_near(cell, cell, 0.0f);
    for (size_t cell = N; cell < N + N_SECOND; cell++)
        assert_row_near(cell, SECOND + cell - N, 0.0f);
}

RUN_CASES(NULL, NULL)
