/* test_plugin_memory.c - the measured memory of a full cache, against the memory that the true bits
 * predict. */
#include <kvant/codec.h>

#include <malloc.h>

#include "harness.h"

#define N_CTX 4096
#define HEAD_DIM 64
#define N_KV_HEADS 3

typedef size_t (*kv_memory_fn)(size_t *reserved);

static kv_memory_fn kv_memory(void)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), "kvant_kv_memory");
    kv_memory_fn function;

    assert_non_null(symbol);
    memcpy(&function, &symbol, sizeof(function));
    return function;
}

static double true_bits(const char *spec, kvant_role role)
{
    kvant_codec_info info = { .size = sizeof(info) };
    kvant_codec *codec;
    double bits;

    assert_int_equal(kvant_codec_create(spec, HEAD_DIM, role, 0, &codec, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_codec_get_info(codec, &info), KVANT_OK);
    bits = info.true_bits;
    kvant_codec_free(&codec);
    return bits;
}

static int n_layers(const struct llama_context *context)
{
    return llama_model_n_layer(llama_get_model(context));
}

static double expected_bytes(const struct llama_context *context, const char *spec, int cells)
{
    return (true_bits(spec, KVANT_ROLE_K) + true_bits(spec, KVANT_ROLE_V)) / 8 * cells *
           N_KV_HEADS * HEAD_DIM * n_layers(context);
}

/* System pages that hold cells but are shared by two tensors: one at either end of each tensor. */
static double edges(const struct llama_context *context)
{
    return 2.0 * n_layers(context) * 2 * 4096;
}

/* Decodes a quarter of the cells. The rest is loaded from that sequence's state three times, which
 * also writes cells and is much faster. */
static void decode_quarter(struct llama_context *context)
{
    llama_token tokens[N_CTX / 4];

    harness_tokens(tokens, N_CTX / 4);
    for (int at = 0; at < N_CTX / 4; at += 512)
        harness_decode(context, tokens + at, 512, at, 0, false);
}

static void load_other_quarters(struct llama_context *context)
{
    size_t size;
    uint8_t *state = harness_save_state(context, &size);

    for (llama_seq_id seq = 1; seq < 4; seq++)
        assert_int_equal(llama_state_seq_set_data(context, state, size, seq), size);
    free(state);
}

/* An untouched cache takes no memory, written cells take their true bits, and a cleared cache takes
 * no memory again. */
CASE(a_cache_takes_its_true_bits)
{
    const harness_options options = {
        .spec = "turboquant-4", .n_ctx = N_CTX, .n_seq = 4, .unified = true
    };
    struct llama_context *context = harness_context(&options);
    double full = expected_bytes(context, options.spec, N_CTX), quarter = full / 4, resident;
    size_t reserved;

    assert_true((double)kv_memory()(NULL) < 0.01 * full);
    decode_quarter(context);
    resident = (double)kv_memory()(NULL);
    print_message("%d cells: resident %.0f bytes, true bits say %.0f\n", N_CTX / 4, resident,
                  quarter);
    assert_true(resident >= quarter && resident <= quarter + edges(context));
    load_other_quarters(context);
    resident = (double)kv_memory()(&reserved);
    print_message("%d cells: resident %.0f bytes, true bits say %.0f (%+.2f %%), reserved %zu\n",
                  N_CTX, resident, full, 100 * (resident / full - 1), reserved);
    assert_true(resident > 0.97 * full && resident < 1.03 * full);
    assert_true(resident <= (double)reserved);
    llama_memory_clear(llama_get_memory(context), true);
    assert_true((double)kv_memory()(NULL) < 0.01 * full);
    llama_free(context);
    assert_int_equal(kv_memory()(&reserved), 0);
    assert_int_equal(reserved, 0);
}

/* The process's memory that belongs to no file, in bytes. */
static double anonymous(void)
{
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    double kib = -1;

    assert_non_null(status);
    while (fgets(line, sizeof(line), status) != NULL)
        if (strncmp(line, "RssAnon:", 8) == 0)
            kib = atof(line + 8);
    fclose(status);
    assert_true(kib > 0);
    return kib * 1024;
}

static void decode_in_batches(struct llama_context *context, int from, int to)
{
    llama_token tokens[N_CTX / 4 + 1];

    harness_tokens(tokens, N_CTX / 4 + 1);
    for (int at = from; at < to; at += 512)
        harness_decode(context, tokens + at, 512, at, 0, false);
}

/* Memory that the process takes beyond the bytes that the plug-in reports for its cache, after the
 * first half of the tokens and after all of them. A token follows each half, because attention then
 * frees a prompt's workspace. Memory that the allocator could free does not count. */
static void find_uncounted(const char *spec, double uncounted[2])
{
    const harness_options options = { .spec = spec, .n_ctx = N_CTX, .unified = true };
    struct llama_context *context;

    /* the process has now allocated everything that it keeps for any context */
    llama_free(harness_context(&options));
    malloc_trim(0);
    uncounted[0] = uncounted[1] = -anonymous();
    context = harness_context(&options);
    for (int half = 0; half < 2; half++) {
        const int from = half * (N_CTX / 8 + 1), to = from + N_CTX / 8;
        decode_in_batches(context, from, to);
        harness_decode(context, &(llama_token){ 1 }, 1, to, 0, false);
        malloc_trim(0);
        uncounted[half] += anonymous() - (double)kv_memory()(NULL);
    }
    llama_free(context);
}

/* Sanitizers keep freed memory, and shadow memory for it. */
static void skip_where_freed_memory_stays(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip();
#endif
}

/* Learning's memory is counted while it exists, and belongs to the system again afterwards. So a
 * context with fp16 pages, which learn nothing, takes as much memory besides its pages. Two things
 * may be more: 64 KiB per layer for tensors and the ends of pages, and 512 KiB that the allocator
 * keeps for one layer's pending rows. Learning takes 170 KiB per layer with these heads, and 500
 * KiB while it solves. */
CASE(all_memory_is_counted)
{
    const harness_options small = { .spec = "f16", .n_ctx = 256 };
    struct llama_context *context;
    double plain[2], learning[2], bound;

    skip_where_freed_memory_stays();
    context = harness_context(&small);
    bound = n_layers(context) * 64.0 * 1024 + 512.0 * 1024;
    llama_free(context);
    find_uncounted("f16", plain);
    find_uncounted("", learning);
    for (int half = 0; half < 2; half++) {
        print_message("%d tokens: %.0f KiB with f16 pages are not counted, %.0f with the default\n",
                      (half + 1) * N_CTX / 8, plain[half] / 1024, learning[half] / 1024);
        assert_true(learning[half] - plain[half] < bound);
    }
}

/* Attention over a long prompt needs more than 1 MiB in addition to the cache. After the next
 * token, it keeps at most an eighth of that, or less than 128 KiB. */
CASE(a_prompts_workspace_is_given_back)
{
    const harness_options options = { .spec = "turboquant-4", .n_ctx = N_CTX, .unified = true };
    struct llama_context *context;
    double prompt, token;

    skip_where_freed_memory_stays();
    context = harness_context(&options);
    decode_in_batches(context, 0, N_CTX / 4);
    prompt = anonymous() - (double)kv_memory()(NULL);
    harness_decode(context, &(llama_token){ 1 }, 1, N_CTX / 4, 0, false);
    token = anonymous() - (double)kv_memory()(NULL);
    print_message("beside the cache: %.0f KiB after a prompt, %.0f after a token\n", prompt / 1024,
                  token / 1024);
    assert_true(token <= prompt - 7.0 / 8 * 1024 * 1024);
    llama_free(context);
}

RUN_CASES(harness_start, harness_stop)
