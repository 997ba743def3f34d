/* test_plugin_steps.c - fp16 pages that the layers of a cache share for the rows of a step
 * (kv_steps.h), in the computer's memory. */
#include "ggml.h"
#include "harness.h"
#include "kv_size.h"

enum { STEP = 512, N_CTX = 4096 };

static const harness_options preset = { .spec = "", .n_ctx = N_CTX, .window = true };
static const harness_options stock = { .n_ctx = N_CTX };

/* Logits of all tokens of the step that begins at pos; the caller frees. */
static float *logits_of_step(struct llama_context *context, const llama_token *tokens, int pos)
{
    const size_t n = STEP * harness_n_vocab();
    float *logits = malloc(n * sizeof(*logits));

    assert_non_null(logits);
    harness_decode(context, tokens + pos, STEP, pos, 0, true);
    memcpy(logits, llama_get_logits(context), n * sizeof(*logits));
    return logits;
}

/* The queries of the first step see no other tokens, so they see exact rows in every layer. The
 * queries of the second step also see tokens 64 to 383, which are sealed.
 *
 * An exact row is rounded to fp16 twice more than in llama.cpp's cache, by 2^-11 each time. The 4
 * bits of the default preset err by about .07, which is 70 times as much. So they alone make the
 * divergence some 5000 times as large. Two kernels that round differently diverge, too, for which a
 * factor of 8 leaves room. If rows were sealed before their queries are over, both steps would
 * diverge about equally. */
CASE(queries_see_the_rows_of_their_step_exactly)
{
    llama_token tokens[2 * STEP];
    struct llama_context *ours = harness_context(&preset), *theirs = harness_context(&stock);
    double kld[2];

    harness_tokens(tokens, 2 * STEP);
    for (int step = 0; step < 2; step++) {
        float *got = logits_of_step(ours, tokens, step * STEP);
        float *want = logits_of_step(theirs, tokens, step * STEP);
        kld[step] = harness_mean_kld(want, got, STEP);
        free(got);
        free(want);
    }
    print_message("KLD of the first step %g, of the second %g\n", kld[0], kld[1]);
    assert_true(kld[1] > 8 * kld[0]);
    llama_free(ours);
    llama_free(theirs);
}

/* Checks the rows that a context keeps as fp16, of keys and values of all layers. */
static void check_exact_rows(size_t n_rows)
{
    struct llama_context *context = harness_context(&preset);
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), "kvant_kv_size");
    kvp_kv_size size = { .size = sizeof(size) };
    kvp_kv_size_fn *function;

    memcpy(&function, &symbol, sizeof(function));
    assert_true(function(false, &size));
    assert_true(size.exact == (double)(n_rows * harness_row_bytes()));
    llama_free(context);
}

/* Each tensor has four pages of 64 rows: the first, and three that the newest 128 rows may lie in.
 * The rows of a step are there once for the keys of all layers, and once for the values. */
CASE(the_room_of_a_step_is_there_once)
{
    check_exact_rows(2 * (size_t)llama_model_n_layer(harness_model()) * 4 * 64 + 2 * STEP);
}

/* Asks for the sizes of a cache's tensors in llama.cpp's order, as ggml does. */
static void ask(const struct ggml_context *context, size_t *bytes, size_t n)
{
    ggml_backend_buffer_type_t buft =
        ggml_backend_dev_buffer_type(ggml_backend_reg_dev_get(harness_plugin(), 0));
    size_t i = 0;

    for (struct ggml_tensor *t = ggml_get_first_tensor(context); t != NULL && i < n;
         t = ggml_get_next_tensor(context, t))
        bytes[i++] = ggml_backend_buft_get_alloc_size(buft, t);
    assert_int_equal(i, n);
}

/* --fit adds up these sizes, and each cache asks for them once or twice. */
CASE(plans_count_the_room_of_a_step_once)
{
    enum { N = 12 };                                   /* keys and values of six layers */
    static const int layers[] = { 5, 11, 0, 1, 2, 6 }; /* layers of two caches, as with a window */
    struct llama_context *context = harness_context(&preset);
    const struct ggml_init_params params = { 2 * N * ggml_tensor_overhead(), NULL, true };
    struct ggml_context *cache = ggml_init(params);
    const int64_t row = (int64_t)(harness_row_bytes() / sizeof(uint16_t));

    for (size_t i = 0; i < N; i++)
        ggml_format_name(ggml_new_tensor_3d(cache, GGML_TYPE_F16, row, N_CTX, 1), "cache_%c_l%d",
                         i % 2 == 0 ? 'k' : 'v', layers[i / 2]);
    for (int time = 0; time < 2; time++) {
        size_t bytes[N];
        ask(cache, bytes, N);
        for (size_t i = 0; i < N; i++) {
            const bool first = i < 2 || (i >= 4 && i < 6);
            assert_int_equal(bytes[i],
                             bytes[N - 2 + i % 2] + (first ? STEP * harness_row_bytes() : 0));
        }
    }
    ggml_free(cache);
    llama_free(context);
}

/* Two layers have a sliding window, and their own cache with room for a step. Its tensors keep no
 * first and no newest tokens. Each has one page, for the block that the next row goes to. */
CASE(a_windows_cache_has_its_own_room)
{
    harness_load_tiny("gemma3");
    check_exact_rows(2 * (2 * 4 + 2 * 1) * 64 + 2 * 2 * STEP);
}

RUN_CASES(harness_start, harness_stop)
