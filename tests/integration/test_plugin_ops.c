/* test_plugin_ops.c - single operations of the KVANT device against ggml's own CPU back end, on
 * random tensors. They are combinations that no single model uses: softcap, ALiBi, sinks, odd head
 * dimensions, several streams. Also the byte view of a cache, and rows that a codec refuses. The
 * header ops_fixture.h makes and computes the operations. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include "ops_fixture.h"

static float *run_kvant(const struct attention_case *c, const struct inputs *in, int n_threads)
{
    struct filled filled = fill_kvant(c, in, n_threads);
    float *out = attend(&filled);

    close_device(&filled.device);
    return out;
}

static void check_case(const struct attention_case *c)
{
    struct inputs in = make_inputs(c);
    float *cpu = run_cpu(c, &in), *one = run_kvant(c, &in, 1), *three = run_kvant(c, &in, 3);
    size_t row = (size_t)(c->v_dim * c->heads), n = row * (size_t)(c->tokens * c->streams);
    double worst = 0;

    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)one[i] - cpu[i]) <= worst))
            worst = fabs((double)one[i] - cpu[i]);
    print_message("%-28s largest difference %.2e of %.2e\n", c->what, worst, tolerance(c));
    assert_true(worst <= tolerance(c));
    assert_memory_equal(one, three, n * sizeof(float));
    free(cpu);
    free(one);
    free(three);
    free_inputs(&in);
}

static const struct attention_case cases[] = {
    { .what = "grouped queries",
      .heads = 9,
      .kv_heads = 3,
      .k_dim = 64,
      .v_dim = 64,
      .cells = 100,
      .tokens = 5,
      .streams = 1,
      .mask = true },
    { .what = "no mask, head_dim 80",
      .heads = 4,
      .kv_heads = 4,
      .k_dim = 80,
      .v_dim = 80,
      .cells = 128,
      .tokens = 3,
      .streams = 1 },
    { .what = "softcap",
      .heads = 8,
      .kv_heads = 2,
      .k_dim = 128,
      .v_dim = 128,
      .cells = 77,
      .tokens = 2,
      .streams = 1,
      .mask = true,
      .softcap = 0.7f },
    { .what = "ALiBi, 6 heads",
      .heads = 6,
      .kv_heads = 3,
      .k_dim = 64,
      .v_dim = 64,
      .cells = 90,
      .tokens = 4,
      .streams = 1,
      .mask = true,
      .max_bias = 8 },
    { .what = "sinks, head_dim 256",
      .heads = 4,
      .kv_heads = 1,
      .k_dim = 256,
      .v_dim = 256,
      .cells = 65,
      .tokens = 3,
      .streams = 1,
      .mask = true,
      .sinks = true },
    { .what = "streams 1 and 2 of 3",
      .heads = 4,
      .kv_heads = 2,
      .k_dim = 64,
      .v_dim = 64,
      .cells = 111,
      .tokens = 3,
      .streams = 2,
      .first_stream = 1,
      .mask = true },
    { .what = "head_dim 96 and 64",
      .heads = 4,
      .kv_heads = 2,
      .k_dim = 96,
      .v_dim = 64,
      .cells = 64,
      .tokens = 33,
      .streams = 1,
      .mask = true },
    { .what = "one token, whole context",
      .heads = 15,
      .kv_heads = 5,
      .k_dim = 64,
      .v_dim = 64,
      .cells = N_CELLS,
      .tokens = 1,
      .streams = 1 },
};

CASE(attention_is_the_cpu_back_ends)
{
    setenv("KVANT_K", "f16", 1);
    setenv("KVANT_V", "f16", 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_case(&cases[i]);
}

/* Keys of the given type that an attention node has bound, in memory that begins as zeros. */
static struct ggml_tensor *bound_cache(struct device *device, const struct attention_case *c)
{
    struct node n = make_node(device->context, c, GGML_TYPE_F16);

    allocate(device);
    assert_true(ggml_backend_dev_supports_op(device->device, n.out));
    return n.k;
}

/* Any range of nominal bytes reads and writes like a tensor of the type that llama.cpp asked
 * for. */
CASE(bytes_behave_like_a_tensor)
{
    static const struct attention_case c = { .heads = 2,
                                             .kv_heads = 2,
                                             .k_dim = 64,
                                             .v_dim = 64,
                                             .cells = N_CELLS,
                                             .tokens = 1,
                                             .streams = 2 };
    struct device device = open_device(kvant_device(), 1);
    struct ggml_tensor *k = bound_cache(&device, &c);
    size_t bytes = ggml_nbytes(k);
    ggml_fp16_t *shadow = calloc(1, bytes), *part = malloc(bytes);

    for (int round = 0; round < 200; round++) {
        size_t offset = (size_t)((random_number() + 1) / 2 * (float)(bytes - 2)) / 2 * 2;
        size_t size =
            (size_t)((random_number() + 1) / 2 * (float)((bytes - offset) / (round % 2 ? 1 : 64))) /
            2 * 2;
        if (round % 10 == 9) {
            ggml_backend_tensor_memset(k, 0, offset, size);
            memset((char *)shadow + offset, 0, size);
        } else {
            for (size_t i = 0; i < size / 2; i++)
                shadow[offset / 2 + i] = ggml_fp32_to_fp16(random_number());
            ggml_backend_tensor_set(k, (char *)shadow + offset, offset, size);
        }
        ggml_backend_tensor_get(k, part, offset / 2, bytes - offset);
        assert_memory_equal(part, (char *)shadow + offset / 2, bytes - offset);
    }
    free(shadow);
    free(part);
    close_device(&device);
}

/* Rows that a codec refuses */

#define BAD_CELL 50 /* in the first stream that takes part; each case has more cells */

/* Ways in which a row with a NaN gets into a cell that holds another row. */
enum way { BY_SET_ROWS, BY_SET, BY_MEMSET, BY_COPY, BY_PARTS, N_WAYS };

static size_t bad_cell(const struct attention_case *c)
{
    return (size_t)c->first_stream * N_CELLS + BAD_CELL;
}

static struct ggml_tensor *row_of(struct ggml_context *context, struct ggml_tensor *cache,
                                  size_t cell)
{
    struct ggml_tensor *view = ggml_view_1d(context, cache, cache->ne[0], cell * cache->nb[1]);

    ggml_backend_view_init(view);
    return view;
}

/* Copies from a tensor of the same back end that is no cache and has these rows. */
static void copy_row(struct device *device, struct ggml_tensor *to, const ggml_fp16_t *row)
{
    struct ggml_init_params params = { .mem_size = 4 * ggml_tensor_overhead(), .no_alloc = true };
    struct ggml_context *context = ggml_init(params);
    struct ggml_tensor *from = ggml_new_tensor_1d(context, GGML_TYPE_F16, to->ne[0]);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(
        context, ggml_backend_dev_buffer_type(device->device));

    ggml_backend_tensor_set(from, row, 0, ggml_nbytes(from));
    ggml_backend_tensor_copy(from, to);
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
}

static void write_row(struct filled *filled, struct ggml_tensor *cache, size_t cell, enum way way,
                      const float *row)
{
    struct ggml_tensor *to = row_of(filled->device.context, cache, cell);
    const size_t n = (size_t)cache->ne[0], bytes = n * sizeof(ggml_fp16_t);
    ggml_fp16_t *halves = malloc(bytes);

    ggml_fp32_to_fp16_row(row, halves, (int64_t)n);
    if (way == BY_SET)
        ggml_backend_tensor_set(to, halves, 0, bytes);
    if (way == BY_MEMSET)
        ggml_backend_tensor_memset(to, 0xff, 0, bytes);
    if (way == BY_COPY)
        copy_row(&filled->device, to, halves);
    for (size_t at = 0; way == BY_PARTS && at < bytes; at += bytes / 4)
        ggml_backend_tensor_set(to, (char *)halves + at, at, bytes / 4);
    free(halves);
}

/* Some outputs on the CPU, from an f32 cache with the bad row, are finite. kvant's outputs of these
 * tokens must equal them. The remaining tokens see the bad row, and each of their heads must be
 * NaN. */
static void check_outputs(const struct attention_case *c, const float *cpu, const float *ours)
{
    const size_t row = (size_t)(c->v_dim * c->heads);
    size_t n_spoilt = 0;

    for (size_t token = 0; token < (size_t)(c->tokens * c->streams); token++) {
        bool sees = false;
        for (size_t i = 0; i < row; i++)
            sees = sees || !isfinite(cpu[token * row + i]);
        n_spoilt += sees;
        for (size_t i = token * row; i < (token + 1) * row; i++)
            assert_true(sees ? isnan(ours[i]) : fabs((double)ours[i] - cpu[i]) <= tolerance(c));
    }
    assert_true(n_spoilt > 0);
}

static void check_bad_row(const struct attention_case *c, bool values, enum way way, float number)
{
    struct inputs in = make_inputs(c);
    const size_t width = (size_t)((values ? c->v_dim : c->k_dim) * c->kv_heads), cell = bad_cell(c);
    float *row = (values ? in.v : in.k) + cell * width, *cpu, *ours;
    const float good = row[width / 2];
    ggml_fp16_t *stored = malloc(width * sizeof(*stored));
    struct filled filled;
    struct ggml_tensor *cache;

    /* The last token of the first stream sees the row in any case. */
    in.mask[(c->tokens - 1) * c->cells + BAD_CELL] = ggml_fp32_to_fp16(-1);
    if (way == BY_SET_ROWS)
        row[width / 2] = number;
    filled = fill_kvant(c, &in, 1);
    cache = values ? filled.node.v : filled.node.k;
    row[width / 2] = number;
    write_row(&filled, cache, cell, way, row);
    row[width / 2] = NAN; /* the CPU's sums may stay finite with an infinity */
    cpu = run_cpu(c, &in);
    ours = attend(&filled);
    check_outputs(c, cpu, ours);
    ggml_backend_tensor_get(cache, stored, cell * cache->nb[1], width * sizeof(*stored));
    for (size_t i = 0; i < width; i++)
        assert_true(isnan(ggml_fp16_to_fp32(stored[i])));
    free(cpu);
    free(ours);
    /* After the next good row everything is as before. */
    row[width / 2] = good;
    write_row(&filled, cache, cell, BY_SET, row);
    if (way == BY_SET_ROWS) /* a token's keys and values are refused together */
        write_row(&filled, values ? filled.node.k : filled.node.v, cell, BY_SET,
                  (values ? in.k : in.v) +
                      cell * (size_t)((values ? c->k_dim : c->v_dim) * c->kv_heads));
    cpu = run_cpu(c, &in);
    ours = attend(&filled);
    for (size_t i = 0; i < (size_t)(c->v_dim * c->heads * c->tokens * c->streams); i++)
        assert_true(fabs((double)ours[i] - cpu[i]) <= tolerance(c));
    free(cpu);
    free(ours);
    free(stored);
    close_device(&filled.device);
    free_inputs(&in);
}

CASE(refused_rows_are_nan_to_whoever_sees_them)
{
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (int values = 0; values < 2; values++)
            for (enum way way = 0; way < N_WAYS; way++)
                check_bad_row(&cases[i], values, way, way % 2 ? INFINITY : NAN);
}

/* The plug-in uses this malloc: glibc's, until the test makes it fail. A sanitizer has its own. */
static bool no_memory;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern void *__libc_malloc(size_t bytes);
__attribute__((visibility("default"))) void *malloc(size_t bytes);

void *malloc(size_t bytes)
{
    return no_memory ? NULL : __libc_malloc(bytes);
}
#define FAILS true
#else
#define FAILS false
#endif

CASE(without_memory_a_written_row_is_nan)
{
    if (!FAILS)
        skip(); /* before anything is allocated, which skip() would leak */
    static const struct attention_case *const c = &cases[0];
    struct inputs in = make_inputs(c);
    struct filled filled = fill_kvant(c, &in, 1);
    const size_t width = (size_t)(c->k_dim * c->kv_heads), cell = bad_cell(c);
    ggml_fp16_t row[3 * 64] = { 0 };
    float *cpu, *ours;

    in.mask[(c->tokens - 1) * c->cells + BAD_CELL] = ggml_fp32_to_fp16(-1);
    set_inputs(&filled.node, &in);
    assert_int_equal(width, 3 * 64);
    free(attend(&filled)); /* until then, rows of SET_ROWS are pending, because they need a mask */
    no_memory = true;
    ggml_backend_tensor_set(filled.node.k, row, cell * sizeof(row), sizeof(row));
    no_memory = false;
    in.k[cell * width] = NAN;
    cpu = run_cpu(c, &in);
    ours = attend(&filled);
    check_outputs(c, cpu, ours);
    free(cpu);
    free(ours);
    close_device(&filled.device);
    free_inputs(&in);
}

RUN_CASES(harness_load_plugin, NULL)
