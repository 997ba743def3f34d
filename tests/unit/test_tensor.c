/* test_tensor.c - a tensor's slots: any order of writes, sequences, clearing, copying, exact
 * blocks, given transforms, bad input, sizes of structs. */
#include "tensor_fixture.h"

static void write_slot(fixture *f, int64_t slot, const float *row)
{
    memcpy(f->rows + slot * WIDTH, row, WIDTH * sizeof *row);
    assert_int_equal(kvant_tensor_write(f->tensor, &slot, 1, row, WIDTH, 1), KVANT_OK);
}

CASE(any_order_of_writes)
{
    static const char *const specs[] = { "f32", "int-4", "turboquant-3" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 21;
        fixture f = make(specs[s], 2, 4, 0);
        float row[WIDTH], want[WIDTH];
        uint64_t written[8] = { 0 };
        for (int i = 0; i < 3000; i++) {
            int64_t slot = (int64_t)(test_random(&rng) % 512);
            fill_normal(row, WIDTH, &rng);
            write_slot(&f, slot, row);
            written[slot / 64] |= (uint64_t)1 << slot % 64;
        }
        for (uint32_t slot = 0; slot < 512; slot++) {
            read_slot(&f, slot, row);
            if (!(written[slot / 64] >> slot % 64 & 1))
                continue;
            through_codec(&f, f.rows + (size_t)slot * WIDTH, want);
            assert_memory_equal(row, want, sizeof row);
        }
        for (uint32_t block = 0; block < 8; block++) {
            assert_true(block_of(&f, block, 1).written == written[block]);
            assert_int_equal(block_of(&f, block, 1).state, KVANT_BLOCK_SEALED);
        }
        drop(&f);
    }
}

CASE(batches_and_threads_write_the_same_bytes)
{
    uint64_t rng = 22;
    fixture one = make("turboquant-4", 1, 8, 0), many = make("turboquant-4", 1, 8, 0);
    float *rows = malloc(1000 * WIDTH * sizeof *rows);
    int64_t slots[1000];
    fill_normal(rows, 1000 * WIDTH, &rng);
    for (int i = 0; i < 1000; i++)
        slots[i] = (int64_t)(test_random(&rng) % 512); /* slots repeat: the later row wins */
    assert_int_equal(kvant_tensor_write(one.tensor, slots, 1000, rows, WIDTH, 1), KVANT_OK);
    assert_int_equal(kvant_tensor_write(many.tensor, slots, 1000, rows, WIDTH, 4), KVANT_OK);
    assert_memory_equal(one.memory, many.memory, one.bytes);
    free(rows);
    drop(&one);
    drop(&many);
}

static void assert_zeros(const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(((const uint8_t *)data)[i], 0);
}

static void assert_reads_zeros(const fixture *f, uint32_t first, uint32_t n)
{
    float row[WIDTH];
    for (uint32_t slot = first; slot < first + n; slot++) {
        read_slot(f, slot, row);
        for (uint32_t j = 0; j < WIDTH; j++)
            assert_true(row[j] == 0);
    }
}

CASE(clear_and_copy_blocks)
{
    static const char *const specs[] = { "int-4", "int-4:axis=channel" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 23;
        fixture f = make(specs[s], 3, 3, 0), g = make_like(&f);
        float *a = malloc(192 * WIDTH * sizeof *a), *b = malloc(192 * WIDTH * sizeof *b);
        write_range(&f, 192, 150, 150, 1, &rng);
        assert_int_equal(kvant_tensor_read(f.tensor, 192, 192, a, WIDTH), KVANT_OK);
        assert_int_equal(kvant_tensor_copy(f.tensor, 3, f.tensor, 6, 3), KVANT_OK);
        assert_int_equal(kvant_tensor_copy(f.tensor, 3, g.tensor, 0, 3), KVANT_OK);
        assert_int_equal(kvant_tensor_read(f.tensor, 384, 192, b, WIDTH), KVANT_OK);
        assert_memory_equal(a, b, 192 * WIDTH * sizeof *a);
        assert_int_equal(kvant_tensor_read(g.tensor, 0, 192, b, WIDTH), KVANT_OK);
        assert_memory_equal(a, b, 192 * WIDTH * sizeof *a);
        assert_reads_zeros(&f, 192 + 150, 42);
        assert_int_equal(tensor_info_of(&f).written_blocks, 6);
        /* Copying empty blocks empties the target. */
        assert_int_equal(kvant_tensor_copy(f.tensor, 0, f.tensor, 6, 3), KVANT_OK);
        assert_reads_zeros(&f, 384, 192);
        assert_int_equal(block_of(&f, 6, 0).state, KVANT_BLOCK_EMPTY);
        assert_int_equal(kvant_tensor_clear_blocks(f.tensor, 4, 1), KVANT_OK);
        assert_reads_zeros(&f, 256, 64);
        assert_int_equal(tensor_info_of(&f).written_blocks, 2);
        kvant_tensor_clear(f.tensor);
        assert_reads_zeros(&f, 0, 9 * 64);
        assert_zeros(f.memory, 9 * tensor_info_of(&f).sealed_bytes);
        assert_int_equal(kvant_tensor_copy(f.tensor, 7, f.tensor, 0, 3), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_tensor_copy(f.tensor, 0, f.tensor, 2, 3),
                         KVANT_ERR_ARGUMENT); /* the ranges overlap */
        assert_int_equal(kvant_tensor_copy(f.tensor, 0, f.tensor, 10, 1), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_tensor_copy(f.tensor, 0, NULL, 0, 1), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_tensor_clear_blocks(f.tensor, 8, 2), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_tensor_clear_blocks(f.tensor, UINT32_MAX, 2), KVANT_ERR_ARGUMENT);
        free(a);
        free(b);
        drop(&g);
        drop(&f);
    }
}

static void assert_bytes(const uint8_t *data, size_t bytes, uint8_t value)
{
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(data[i], value);
}

/* Blocks with other memory between them have the same pages as blocks that follow each other, and
 * the memory between them does not change. */
CASE(blocks_apart)
{
    enum { N = 5, GAP = 192 };
    uint64_t rng = 29;
    fixture f = make("int-4", 1, N, 0);
    const size_t block = tensor_info_of(&f).sealed_bytes, stride = block + GAP;
    kvant_tensor_params params = params_of(&f);
    params.block_stride = stride;
    size_t bytes = 0;
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    assert_int_equal(bytes, (N - 1) * stride + block);
    uint8_t *memory = aligned(N * stride);
    for (uint32_t b = 0; b < N; b++)
        memset(memory + b * stride + block, 0xa5, GAP);
    fixture g = f;
    g.tensor = NULL;
    assert_int_equal(kvant_tensor_create(&params, memory, &g.tensor), KVANT_OK);
    write_range(&f, 0, 300, 300, 1, &rng);
    int64_t slots[300];
    for (int i = 0; i < 300; i++)
        slots[i] = i;
    assert_int_equal(kvant_tensor_write(g.tensor, slots, 300, f.rows, WIDTH, 1), KVANT_OK);
    for (uint32_t b = 0; b < N; b++) {
        assert_memory_equal(memory + b * stride, (const uint8_t *)f.memory + b * block, block);
        assert_bytes(memory + b * stride + block, GAP, 0xa5);
    }
    assert_int_equal(kvant_tensor_copy(f.tensor, 0, g.tensor, 3, 2), KVANT_OK);
    assert_memory_equal(memory + 4 * stride, (const uint8_t *)f.memory + block, block);
    kvant_tensor_clear(g.tensor);
    for (uint32_t b = 0; b < N; b++) {
        assert_bytes(memory + b * stride, block, 0);
        assert_bytes(memory + b * stride + block, GAP, 0xa5);
    }
    kvant_tensor_free(&g.tensor);
    free(memory);
    drop(&f);
}

CASE(strides_that_cannot_be)
{
    static const char *const open[] = { "int-4:sink=4", "int-4:recent=64", "int-4:axis=channel",
                                        "int-4:center=first" };
    size_t bytes = 0;
    fixture f = make("int-4", 1, 2, 0);
    const size_t block = tensor_info_of(&f).sealed_bytes;
    const size_t wrong[] = { block - 64, block + 32, 64, 1, SIZE_MAX - 63 };
    kvant_tensor_params params = params_of(&f);
    for (size_t i = 0; i < COUNT(wrong); i++) {
        params.block_stride = wrong[i];
        kvant_status status = i < 4 ? KVANT_ERR_ARGUMENT : KVANT_ERR_MEMORY;
        assert_int_equal(kvant_tensor_size(&params, &bytes), status);
    }
    drop(&f);
    for (size_t i = 0; i < COUNT(open); i++) {
        f = make(open[i], 1, 2, 0);
        params = params_of(&f);
        params.block_stride = 1 << 20;
        assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_ERR_ARGUMENT);
        assert_non_null(strstr(kvant_error_message(), "fp16 rows"));
        drop(&f);
    }
}

/* The engine assigns blocks. Its assignment decides which blocks are sinks and for which window
 * they count. */
CASE(assigned_blocks)
{
    uint64_t rng = 26;
    fixture f = make("int-4:sink=64,recent=64", 2, 6, 0), g;
    assert_int_equal(kvant_tensor_assign(f.tensor, 0, 0, 0),
                     KVANT_ERR_ARGUMENT); /* positions are fixed here */
    f.params.blocks_per_sequence = 0;
    g = make_like(&f);
    static const uint32_t blocks[2][3] = { { 7, 3, 9 }, { 2, 8, 0 } };
    for (uint32_t s = 0; s < 2; s++)
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(kvant_tensor_assign(g.tensor, blocks[s][i], s, i), KVANT_OK);
    assert_int_equal(kvant_tensor_assign(g.tensor, 12, 0, 0), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_assign(g.tensor, 1, 2, 0), KVANT_ERR_ARGUMENT);
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t s = 0; s < 2; s++)
            write_range(&g, blocks[s][i] * 64, 64, 16, 2, &rng);
    for (uint32_t s = 0; s < 2; s++) {
        assert_int_equal(block_of(&g, blocks[s][0], 0).state, KVANT_BLOCK_SINK);
        assert_int_equal(block_of(&g, blocks[s][1], 0).state, KVANT_BLOCK_SEALED);
        assert_int_equal(block_of(&g, blocks[s][2], 0).state, KVANT_BLOCK_OPEN);
        for (uint32_t i = 0; i < 3; i++)
            check_slots(&g, blocks[s][i] * 64, 64);
    }
    /* the block holds rows */
    assert_int_equal(kvant_tensor_assign(g.tensor, 7, 1, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_clear_blocks(g.tensor, 7, 1), KVANT_OK);
    assert_int_equal(kvant_tensor_assign(g.tensor, 7, 1, 1), KVANT_OK);
    drop(&g);
    drop(&f);
}

/* Four blocks are all assigned as the first of a sequence, but there are fewer exact pages, which
 * the last blocks get. No row is lost, also when all blocks come in one batch. */
CASE(more_sinks_than_pages)
{
    static const char *const specs[] = { "int-4:sink=64", "int-4:sink=64,recent=64",
                                         "int-8:axis=channel,sink=64" };
    for (size_t s = 0; s < COUNT(specs); s++)
        for (uint32_t batch = 1; batch <= 256; batch += 255) {
            uint64_t rng = 27;
            fixture f = make(specs[s], 1, 8, 1), g;
            f.params.blocks_per_sequence = 0;
            g = make_like(&f);
            for (uint32_t block = 0; block < 4; block++)
                assert_int_equal(kvant_tensor_assign(g.tensor, block, 0, 0), KVANT_OK);
            write_range(&g, 0, 256, batch, 2, &rng);
            assert_int_equal(block_of(&g, 3, 0).state, KVANT_BLOCK_SINK);
            for (uint32_t i = 0; i < 256;
                 i++) { /* a range of 8, 15 steps and half a step's error; 8 bits err less */
                float got[WIDTH];
                read_slot(&g, i, got);
                for (uint32_t j = 0; j < WIDTH; j++)
                    assert_true(fabsf(got[j] - g.rows[(size_t)i * WIDTH + j]) <=
                                8 / 15.0f / 2 * 1.01f);
            }
            drop(&g);
            drop(&f);
        }
}

static uint32_t count_open(const fixture *f)
{
    uint32_t open = 0;
    for (uint32_t block = 0; block < f->params.n_blocks; block++)
        open += is_open(f, block);
    return open;
}

static double worst_error(const fixture *f, uint32_t n)
{
    double worst = 0;
    float got[WIDTH];
    for (uint32_t i = 0; i < n; i++) {
        read_slot(f, i, got);
        for (size_t j = 0; j < WIDTH; j++)
            worst = fmax(worst, fabs(got[j] - f->rows[i * WIDTH + j]));
    }
    return worst;
}

/* int-8 over a range of 2 (numbers in +-1): half a step is 1/255. The fp16 of scale and zero point
 * adds 2^-11 of the range. A row may be quantised twice, because its block became exact again, and
 * a third time with one page. */
#define INT8_ERROR (1 / 255.0 + 2 * 4.9e-4)

CASE(block_codecs_go_through_open_pages)
{
    for (uint32_t n_open = 1; n_open <= 3; n_open += 2) {
        uint64_t rng = 24;
        fixture f = make("int-8:axis=channel", 1, 5, n_open);
        float *rows = malloc(300 * WIDTH * sizeof *rows);
        for (size_t i = 0; i < 300 * WIDTH; i++)
            rows[i] = (float)(2 * test_uniform(&rng) - 1);
        for (int64_t i = 0; i < 63; i++)
            write_slot(&f, i, rows + i * WIDTH);
        assert_int_equal(count_open(&f), 1);
        assert_true(worst_error(&f, 63) <= 4.9e-4); /* fp16: 2^-11 */
        write_slot(&f, 63, rows + 63 * WIDTH);
        assert_int_equal(count_open(&f), 0);
        assert_true(worst_error(&f, 64) <= INT8_ERROR);
        for (int64_t i = 64; i < 300; i++)
            write_slot(&f, i, rows + i * WIDTH);
        assert_int_equal(count_open(&f), 1); /* 300 tokens are 4 blocks and 44 tokens */
        /* Rewriting a slot of a sealed block makes the block exact again and loses no slot. */
        for (size_t j = 0; j < WIDTH; j++)
            rows[10 * WIDTH + j] = -rows[10 * WIDTH + j];
        write_slot(&f, 10, rows + 10 * WIDTH);
        assert_int_equal(count_open(&f), n_open == 1 ? 1 : 2);
        write_slot(&f, 200, rows + 200 * WIDTH);
        write_slot(&f, 100, rows + 100 * WIDTH);
        assert_true(count_open(&f) <= n_open);
        assert_true(worst_error(&f, 300) <= 2 * INT8_ERROR);
        free(rows);
        drop(&f);
    }
}

/* When a group is sealed before all its slots were written, the remaining slots read as zeros. */
CASE(gaps_read_as_nothing)
{
    static const char *const specs[] = { "int-8:axis=channel", "int-8:axis=channel,group=16",
                                         "turboquant-4:recent=64" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 28;
        fixture f = make(specs[s], 1, 5, 1);
        write_range(&f, 3, 10, 10, 1, &rng);
        write_range(&f, 64, 1, 1, 1, &rng);
        assert_int_equal(block_of(&f, 0, 0).state, KVANT_BLOCK_SEALED);
        assert_true(block_of(&f, 0, 0).written == (uint64_t)0x3ff << 3);
        assert_reads_zeros(&f, 0, 3);
        assert_reads_zeros(&f, 13, 51);
        write_range(&f, 20, 2, 2, 1, &rng); /* makes the block exact again */
        assert_reads_zeros(&f, 13, 7);
        assert_true(error_of(&f, 3, 10) < 0.5);
        drop(&f);
    }
}

/* Reading slots in any order gives the same rows as reading each slot alone, with any number of
 * threads. */
CASE(slots_are_read_in_any_order)
{
    enum { N = 200 };
    fixture f = make("int-4:axis=channel,sink=4", 2, 3, 4);
    float *rows = calloc(N * WIDTH, sizeof *rows), one[WIDTH];
    int64_t slots[N];
    assert_non_null(rows);
    for (int64_t slot = 0; slot < 300; slot++) {
        float row[WIDTH];
        for (int i = 0; i < WIDTH; i++)
            row[i] = (float)((slot * 31 + i * 7) % 41) - 20;
        write_slot(&f, slot, row);
    }
    for (int i = 0; i < N; i++)
        slots[i] = i % 9 == 8 ? -1 : i < 100 ? i + 37 : (i * 53) % 384;
    for (uint32_t n_threads = 1; n_threads < 4; n_threads++) {
        memset(rows, 0xff, N * WIDTH * sizeof *rows);
        assert_ok(kvant_tensor_read_slots(f.tensor, slots, N, rows, WIDTH, n_threads));
        for (int i = 0; i < N; i++) {
            memset(one, 0, sizeof one);
            if (slots[i] >= 0)
                assert_ok(kvant_tensor_read(f.tensor, (size_t)slots[i], 1, one, WIDTH));
            assert_memory_equal(rows + i * WIDTH, one, sizeof one);
        }
    }
    slots[3] = 384;
    assert_int_equal(kvant_tensor_read_slots(f.tensor, slots, N, rows, WIDTH, 1),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_read_slots(f.tensor, slots, 2, rows, WIDTH - 1, 1),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_read_slots(f.tensor, slots, 2, rows, WIDTH, 0),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_read_slots(NULL, slots, 2, rows, WIDTH, 1), KVANT_ERR_ARGUMENT);
    free(rows);
    drop(&f);
}

CASE(given_centre_and_scale)
{
    static const char *const specs[] = { "turboquant-4:center=first,norm=first,sink=0",
                                         "int-4:axis=channel,center=first,norm=first,sink=0" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 25;
        fixture f = make(specs[s], 1, 2, 0);
        float center[WIDTH], scale[WIDTH], row[WIDTH], got[WIDTH];
        const kvant_affine affine = { center, scale }, only_center = { .center = center };
        fill_normal(center, WIDTH, &rng);
        for (uint32_t i = 0; i < WIDTH; i++) {
            center[i] *= 100;
            scale[i] = i % 2 ? 30 : 0.01f;
        }
        assert_null(block_of(&f, 0, 1).affine.center);
        assert_null(block_of(&f, 0, 1).affine.scale);
        center[5] = NAN;
        assert_int_equal(kvant_tensor_set_affine(f.tensor, &affine), KVANT_ERR_NONFINITE);
        center[5] = 1;
        scale[7] = 0;
        assert_int_equal(kvant_tensor_set_affine(f.tensor, &affine), KVANT_ERR_ARGUMENT);
        scale[7] = 30;
        assert_int_equal(kvant_tensor_set_affine(f.tensor, NULL), KVANT_ERR_ARGUMENT);
        assert_int_equal(tensor_info_of(&f).n_transforms, 1);
        assert_int_equal(kvant_tensor_set_affine(f.tensor, &only_center), KVANT_OK);
        assert_ok(kvant_tensor_set_affine(f.tensor, &affine)); /* the last given transform counts */
        double error = 0;
        for (int64_t i = 0; i < 60;
             i++) { /* before enough rows came; after that the tensor may prefer its own numbers */
            for (uint32_t j = 0; j < WIDTH; j++)
                row[j] = center[j] + scale[j] * test_normal(&rng);
            write_slot(&f, i, row);
            read_slot(&f, (uint32_t)i, got);
            for (uint32_t j = 0; j < WIDTH; j++)
                error += pow((row[j] - got[j]) / scale[j], 2) / WIDTH / 60;
        }
        /* Whatever the size of a channel was, the codec sees numbers of variance 1. */
        assert_true(error < 0.05);
        for (uint32_t h = 0; h < N_KV_HEADS; h++) {
            assert_memory_equal(block_of(&f, 0, h).affine.center, center + h * HEAD_DIM,
                                HEAD_DIM * sizeof *center);
            assert_memory_equal(block_of(&f, 0, h).affine.scale, scale + h * HEAD_DIM,
                                HEAD_DIM * sizeof *scale);
        }
        assert_int_equal(kvant_tensor_set_affine(f.tensor, &affine), KVANT_ERR_ARGUMENT);
        kvant_tensor_clear(f.tensor);
        assert_null(block_of(&f, 0, 0).affine.center);
        assert_int_equal(tensor_info_of(&f).n_transforms, 1);
        assert_int_equal(kvant_tensor_set_affine(f.tensor, &only_center), KVANT_OK);
        drop(&f);
    }
    /* Given numbers that no codec of the tensor uses are refused instead of forgotten. */
    fixture f = make("turboquant-4:norm=first", 1, 2, 0);
    float ones[WIDTH];
    for (uint32_t i = 0; i < WIDTH; i++)
        ones[i] = 1;
    assert_int_equal(kvant_tensor_set_affine(f.tensor, &(kvant_affine){ .center = ones }),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_set_affine(f.tensor, &(kvant_affine){ .scale = ones }), KVANT_OK);
    drop(&f);
}

CASE(bad_input)
{
    fixture f = make("int-4", 1, 2, 0);
    float rows[2 * WIDTH] = { 0 };
    int64_t slots[2] = { 0, 128 };
    rows[3] = 1;
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 2, rows, WIDTH, 1), KVANT_ERR_ARGUMENT);
    slots[1] = -1;
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 2, rows, WIDTH, 1), KVANT_ERR_ARGUMENT);
    slots[1] = INT64_MIN;
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 2, rows, WIDTH, 1), KVANT_ERR_ARGUMENT);
    slots[1] = INT64_MAX;
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 2, rows, WIDTH, 1), KVANT_ERR_ARGUMENT);
    slots[1] = 1;
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 2, rows, WIDTH - 1, 1),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 2, rows, WIDTH, 0), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 0, rows, WIDTH, 1), KVANT_OK);
    rows[WIDTH + 40] = INFINITY; /* second kv head of the second row */
    assert_int_equal(kvant_tensor_write(f.tensor, slots, 2, rows, WIDTH, 1), KVANT_ERR_NONFINITE);
    assert_zeros(f.memory, f.bytes);
    assert_int_equal(tensor_info_of(&f).written_blocks, 0);
    assert_int_equal(kvant_tensor_read(f.tensor, 127, 2, rows, WIDTH), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_read(f.tensor, SIZE_MAX, 2, rows, WIDTH), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_read(f.tensor, 0, 2, rows, WIDTH - 1), KVANT_ERR_ARGUMENT);
    kvant_block_info info = { .size = sizeof info };
    assert_int_equal(kvant_tensor_get_block(f.tensor, 2, 0, &info), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_get_block(f.tensor, 0, 2, &info), KVANT_ERR_ARGUMENT);
    kvant_tensor_free(NULL);
    drop(&f);
}

CASE(bad_params)
{
    fixture f = make("int-4", 1, 2, 0);
    const kvant_tensor_params good = params_of(&f);
    const kvant_codec *missing[N_KV_HEADS] = { f.codecs[0], NULL };
    kvant_tensor_params params;
    size_t bytes;
#define REFUSED(status, change)                                                                    \
    do {                                                                                           \
        kvant_tensor *tensor = f.tensor;                                                           \
        params = good;                                                                             \
        change;                                                                                    \
        assert_int_equal(kvant_tensor_size(&params, &bytes), status);                              \
        assert_int_equal(kvant_tensor_create(&params, f.memory, &tensor), status);                 \
        assert_null(tensor);                                                                       \
        assert_true(strlen(kvant_error_message()) > 8);                                            \
    } while (0)
    REFUSED(KVANT_ERR_ARGUMENT, params.codecs = NULL);
    REFUSED(KVANT_ERR_ARGUMENT, params.codecs = missing);
    REFUSED(KVANT_ERR_ARGUMENT, params.n_kv_heads = 0);
    REFUSED(KVANT_ERR_ARGUMENT, params.n_sequences = 0);
    REFUSED(KVANT_ERR_ARGUMENT, params.n_blocks = 0);
    REFUSED(KVANT_ERR_ARGUMENT, params.n_blocks = UINT32_MAX);
    REFUSED(KVANT_ERR_ARGUMENT, params.blocks_per_sequence = 1); /* one sequence, two blocks */
    assert_int_equal(kvant_tensor_size(&good, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_size(NULL, &bytes), KVANT_ERR_ARGUMENT);
    kvant_tensor *tensor = f.tensor;
    assert_int_equal(kvant_tensor_create(&good, (char *)f.memory + 16, &tensor),
                     KVANT_ERR_ARGUMENT);
    assert_null(tensor);
    assert_int_equal(kvant_tensor_create(&good, NULL, &tensor), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_create(&good, f.memory, NULL), KVANT_ERR_ARGUMENT);
    fixture sinks = make("int-4:sink=64,recent=4096", 1, 2, 0);
    params = params_of(&sinks);
    params.n_sequences = UINT32_MAX;
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_ERR_MEMORY);
    drop(&sinks);
    drop(&f);
}

RUN_CASES(NULL, NULL)
