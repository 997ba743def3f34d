/* test_plugin_buffer.c - where ggml places cache tensors, and which sizes the plug-in tells it. The
 * sizes stay the same for a context, whatever happens to the environment and to files. No tensor's
 * cells reach into another tensor. */
#define _POSIX_C_SOURCE 200809L /* setenv, mkstemp */

#include "ggml.h"
#include "harness.h"
#include "../../integrations/llama.cpp/abi.h"

enum { ROW = 128, N_CELLS = 256, N_LAYERS = 2, SLACK = 1 << 20 };

typedef struct layout {
    ggml_backend_t backend;
    struct ggml_context *context;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor *keys[N_LAYERS];
    size_t size; /* size of one tensor */
} layout;

static void choose(const char *spec)
{
    setenv("KVANT_K", spec, 1);
    setenv("KVANT_V", spec, 1);
}

/* Asks for sizes as ggml does before it places tensors, with more room after the tensors than they
 * need. */
static layout size_tensors(void)
{
    ggml_backend_dev_t device = ggml_backend_reg_dev_get(harness_plugin(), 0);
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device);
    struct ggml_init_params params = { .mem_size = 64 * ggml_tensor_overhead(), .no_alloc = true };
    struct ggml_tensor *values;
    layout l = { .backend = ggml_backend_dev_init(device, NULL), .context = ggml_init(params) };

    assert_non_null(l.backend);
    for (int i = 0; i < N_LAYERS; i++) {
        l.keys[i] = ggml_new_tensor_3d(l.context, GGML_TYPE_F16, ROW, N_CELLS, 1);
        ggml_format_name(l.keys[i], "cache_k_l%d", i);
        l.size = ggml_backend_buft_get_alloc_size(buft, l.keys[i]);
    }
    /* Keys without values would stay in llama.cpp's own cache. */
    values = ggml_new_tensor_3d(l.context, GGML_TYPE_F16, ROW, N_CELLS, 1);
    ggml_set_name(values, "cache_v_l0");
    ggml_backend_buft_get_alloc_size(buft, values);
    l.buffer = ggml_backend_buft_alloc_buffer(buft, N_LAYERS * l.size + SLACK);
    assert_non_null(l.buffer);
    return l;
}

static enum ggml_status place(layout *l, int i, size_t offset)
{
    return ggml_backend_tensor_alloc(l->buffer, l->keys[i],
                                     (char *)ggml_backend_buffer_get_base(l->buffer) + offset);
}

static void free_layout(layout *l)
{
    ggml_backend_buffer_free(l->buffer);
    ggml_free(l->context);
    ggml_backend_free(l->backend);
}

static void fill(ggml_fp16_t *rows, uint64_t seed)
{
    for (int i = 0; i < ROW * N_CELLS; i++)
        rows[i] = ggml_fp32_to_fp16(harness_random(&seed));
}

CASE(sizes_stay_when_the_environment_changes)
{
    static ggml_fp16_t rows[ROW * N_CELLS], before[ROW * N_CELLS], after[ROW * N_CELLS];
    layout l;

    choose("int-2");
    l = size_tensors();
    choose("f16");
    for (int i = 0; i < N_LAYERS; i++)
        assert_int_equal(place(&l, i, (size_t)i * l.size), GGML_STATUS_SUCCESS);
    fill(rows, 1);
    ggml_backend_tensor_set(l.keys[0], rows, 0, sizeof(rows));
    ggml_backend_tensor_get(l.keys[0], before, 0, sizeof(before));
    fill(rows, 2);
    ggml_backend_tensor_set(l.keys[1], rows, 0, sizeof(rows));
    ggml_backend_tensor_get(l.keys[0], after, 0, sizeof(after));
    assert_memory_equal(before, after, sizeof(before));
    free_layout(&l);
}

CASE(the_next_context_has_the_new_settings)
{
    layout small, large;

    choose("int-2");
    small = size_tensors();
    choose("f16");
    large = size_tensors();
    assert_true(large.size > 4 * small.size);
    free_layout(&small);
    free_layout(&large);
}

/* Changes a settings file, which may happen between the questions. */
static void write_config(const char *path, const char *spec)
{
    uint64_t checksum = 0xcbf29ce484222325u;
    char body[256];
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    snprintf(body, sizeof(body), "kvant-settings 1\nlayers 2\nk 0-1 2x64 %s\nv 0-1 2x64 %s\n", spec,
             spec);
    for (const char *at = body; *at != '\0'; at++)
        checksum = (checksum ^ (unsigned char)*at) * 0x100000001b3u;
    fprintf(file, "%scheck %016llx\n", body, (unsigned long long)checksum);
    assert_int_equal(fclose(file), 0);
}

CASE(sizes_stay_when_a_file_changes)
{
    char path[] = "/tmp/kvant-config-XXXXXX";
    ggml_backend_buffer_type_t buft =
        ggml_backend_dev_buffer_type(ggml_backend_reg_dev_get(harness_plugin(), 0));
    layout l;

    unsetenv("KVANT_K");
    unsetenv("KVANT_V");
    assert_int_not_equal(mkstemp(path), -1);
    write_config(path, "int-2");
    setenv("KVANT_CONFIG", path, 1);
    l = size_tensors();
    write_config(path, "f16");
    for (int i = 0; i < N_LAYERS; i++) {
        assert_int_equal(ggml_backend_buft_get_alloc_size(buft, l.keys[i]), l.size);
        assert_int_equal(place(&l, i, (size_t)i * l.size), GGML_STATUS_SUCCESS);
    }
    free_layout(&l);
    unsetenv("KVANT_CONFIG");
    remove(path);
}

CASE(overlapping_tensors_are_refused)
{
    static const size_t apart[] = { 0, 1, 2 }; /* halves of a tensor */

    choose("int-4");
    for (size_t i = 0; i < sizeof(apart) / sizeof(apart[0]); i++) {
        layout l = size_tensors();
        size_t step = apart[i] == 2 ? l.size : apart[i] * (l.size / 2 / 64 * 64);

        assert_int_equal(place(&l, 1, step), GGML_STATUS_SUCCESS);
        assert_int_equal(place(&l, 0, 0),
                         apart[i] == 2 ? GGML_STATUS_SUCCESS : GGML_STATUS_ALLOC_FAILED);
        free_layout(&l);
    }
}

static int start(void **state)
{
    setenv("KVANT_HEAD_DIM", "64", 1);
    return harness_load_plugin(state);
}

/* Rows that lie apart in the program's memory, as llama.cpp transfers them when each device has a
 * part of every row. They have the bytes of rows that come one by one, and bytes between them
 * stay. */
CASE(rows_may_lie_apart)
{
    enum { FIRST = 3, N = 100, APART = 300 };
    static ggml_fp16_t rows[ROW * N_CELLS], apart[N * APART], got[N * APART], one[ROW];
    const size_t row = ROW * sizeof(*rows), stride = APART * sizeof(*rows);
    layout l;

    choose("int-4");
    l = size_tensors();
    for (int i = 0; i < N_LAYERS; i++)
        assert_int_equal(place(&l, i, (size_t)i * l.size), GGML_STATUS_SUCCESS);
    assert_non_null(((const abi_buffer *)(const void *)l.buffer)->iface.get_tensor_2d);
    assert_non_null(((const abi_buffer *)(const void *)l.buffer)->iface.set_tensor_2d);
    fill(rows, 3);
    for (int i = 0; i < N; i++)
        memcpy(apart + i * APART, rows + i * ROW, row);
    ggml_backend_tensor_set_2d(l.keys[0], apart, FIRST * row, row, N, row, stride);
    for (int i = 0; i < N; i++)
        ggml_backend_tensor_set(l.keys[1], rows + i * ROW, (size_t)(FIRST + i) * row, row);
    memset(got, 0x11, sizeof(got));
    memset(apart, 0x11, sizeof(apart));
    for (int i = 0; i < N; i++) {
        ggml_backend_tensor_get(l.keys[1], one, (size_t)(FIRST + i) * row, row);
        memcpy(apart + i * APART, one, row);
    }
    ggml_backend_tensor_get_2d(l.keys[0], got, FIRST * row, row, N, row, stride);
    assert_memory_equal(got, apart, sizeof(got));
    /* columns of rows */
    ggml_backend_tensor_get_2d(l.keys[0], got, FIRST * row + 64, 32, N, row, stride);
    for (int i = 0; i < N; i++)
        assert_memory_equal(got + i * APART, apart + i * APART + 32, 32);
    free_layout(&l);
}

RUN_CASES(start, NULL)
