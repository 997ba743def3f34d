/* test_plugin_size.c - the size that the plug-in reports for a full cache (kvant_kv_size: the line
 * at the start, `kvant inspect`), compared with the counted bytes of the full cache. In the
 * computer's memory, and on the mock of a GPU. */
#include "harness.h"
#include "kv_size.h"

static void *plugin_function(const char *name)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), name);

    assert_non_null(symbol);
    return symbol;
}

static double counted_bytes(double *reserved)
{
    void *symbol = plugin_function("kvant_kv_memory");
    size_t (*memory)(size_t *), all;
    double bytes;

    memcpy(&memory, &symbol, sizeof(memory));
    bytes = (double)memory(&all);
    *reserved = (double)all;
    return bytes;
}

static kvp_kv_size_fn *size_function(void)
{
    void *symbol = plugin_function("kvant_kv_size");
    kvp_kv_size_fn *function;

    memcpy(&function, &symbol, sizeof(function));
    return function;
}

static kvp_kv_size said_size(bool on_gpu)
{
    kvp_kv_size size = { .size = sizeof(size) };

    assert_true(size_function()(on_gpu, &size));
    return size;
}

static void fill(struct llama_context *context, int n)
{
    llama_token *tokens = malloc((size_t)n * sizeof(*tokens));

    assert_non_null(tokens);
    harness_tokens(tokens, n);
    for (int at = 0; at < n; at += 512)
        harness_decode(context, tokens + at, n - at < 512 ? n - at : 512, at, 0, false);
    llama_synchronize(context);
    free(tokens);
}

typedef struct sizes {
    kvp_kv_size said;
    double counted, reserved; /* when the cache is full */
} sizes;

static sizes sizes_of(const char *spec, uint32_t n_ctx)
{
    const harness_options options = { .spec = spec, .n_ctx = n_ctx, .unified = true };
    struct llama_context *context = harness_context(&options);
    sizes s = { .said = said_size(harness_on_gpu()) };

    assert_true(s.said.cells == n_ctx);
    fill(context, (int)n_ctx);
    s.counted = counted_bytes(&s.reserved);
    print_message("%s, %u tokens: said %.0f (%.0f exact, %.0f transforms), and %.0f while it "
                  "learns; counted %.0f\n",
                  spec[0] != '\0' ? spec : "default", n_ctx, s.said.bytes, s.said.exact,
                  s.said.transforms, s.said.working, s.counted);
    llama_free(context);
    return s;
}

static int n_tensors(void)
{
    return 2 * llama_model_n_layer(harness_model());
}

/* A tensor shares the system's pages at its two ends with its neighbours. */
static double edges(void)
{
    return n_tensors() * 2.0 * 4096;
}

/* On a GPU each tensor has up to 256 bytes that align the next. The size of kv_size.h leaves out up
 * to 16 bytes of tables for each token, and 16 KiB of attention's workspace for one token. */
static double gpu_tables(uint32_t n_ctx)
{
    return n_tensors() * 256.0 + 16.0 * n_ctx + 16384;
}

/* Copies of a batch of 512 tokens on its way to the threads that learn: keys and queries of 8
 * layers in fp32. */
static double gpu_copies(void)
{
    const struct llama_model *model = harness_model();
    const double head_dim = (double)llama_model_n_embd(model) / llama_model_n_head(model);
    const double heads = llama_model_n_head(model) + llama_model_n_head_kv(model);

    return 8 * 512.0 * heads * (head_dim > 128 ? head_dim : 128) * sizeof(float);
}

/* These codecs learn nothing, so the reported bytes are the counted bytes. */
static void check_plain(const char *spec, uint32_t n_ctx)
{
    const sizes s = sizes_of(spec, n_ctx);

    assert_true(s.said.working == 0);
    assert_true(s.counted >= s.said.bytes);
    assert_true(s.counted <= s.said.bytes + (harness_on_gpu() ? gpu_tables(n_ctx) : edges()));
}

/* The default preset. The reported size counts the largest number of transforms, one for each
 * position bucket. A CPU's cache may have two more early transforms, which later ones replace. A
 * cache that has learned has at least one transform. */
static void check_learning(uint32_t n_ctx)
{
    const sizes one = sizes_of("", 512), s = sizes_of("", n_ctx);
    const double transform = one.said.transforms / (harness_on_gpu() ? 1 : 3);
    /* One fp16 page of each tensor is for rows that begin within a block. These batches begin with
     * a block, so they do not touch that page. Nor do they touch the codes of blocks that are exact
     * at the end, which are as many as there are fp16 pages. A GPU reserves the size that it
     * reports. */
    const double numbers = s.said.numbers[0] + s.said.numbers[1];
    const double codes = s.said.codec_bits / 8 * s.said.exact / (sizeof(uint16_t) * numbers);
    const double page = 64 * sizeof(uint16_t) * numbers / s.said.cells;
    const double spare = harness_on_gpu() ? 0 : page + codes;
    const double least = s.said.bytes - s.said.transforms + transform - spare;
    const double most = s.said.bytes + s.said.working;

    assert_true(s.said.exact > 0 && s.said.transforms >= one.said.transforms && s.said.working > 0);
    assert_true(s.counted >= least);
    assert_true(s.counted <=
                most + (harness_on_gpu() ? gpu_tables(n_ctx) + gpu_copies() : edges()));
    if (harness_on_gpu()) /* the buffer has pages and fp16 pages */
        assert_true(s.reserved - (s.said.bytes - s.said.transforms) <= n_tensors() * 256.0 &&
                    s.reserved >= s.said.bytes - s.said.transforms);
}

/* Two contexts; the longer one has two position buckets, on a GPU, too. */
CASE(two_contexts)
{
    check_plain("turboquant-4", 512);
    check_plain("f16", 2304);
    if (harness_on_gpu()) /* groups of several tokens need staging pages there (gpu/groups.c) */
        check_plain("int-3:axis=channel", 2304);
    check_learning(1024);
    check_learning(2304);
}

CASE(head_dim_128)
{
    harness_load_tiny("llama128");
    check_plain("turboquant-4", 1024);
    check_learning(2304);
}

/* A cache in the computer's memory can also report the size of a cache on a GPU. The numbers are
 * the same, and there are at least 8 fp16 pages of 64 tokens for each tensor. A cache on a GPU
 * refuses to report the size of a CPU's cache. */
CASE(a_gpus_sizes_are_told_anywhere)
{
    const harness_options options = { .spec = "", .n_ctx = 2304, .unified = true };
    struct llama_context *context = harness_context(&options);
    kvp_kv_size there, other = { .size = sizeof(other) };

    there = said_size(true);
    if (harness_on_gpu()) {
        assert_false(size_function()(false, &other));
    } else {
        other = said_size(false);
        assert_true(there.numbers[0] == other.numbers[0] && there.numbers[1] == other.numbers[1]);
        assert_true(there.cells == other.cells && there.codec_bits == other.codec_bits);
        assert_true(there.exact >=
                    8 * 64 * 2 * (there.numbers[0] + there.numbers[1]) / there.cells);
    }
    llama_free(context);
    other.size = 1;
    assert_false(size_function()(true, &other));
}

RUN_CASES(harness_start, harness_stop)
