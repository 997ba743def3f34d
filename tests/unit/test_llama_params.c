/* test_llama_params.c - the parameters of llama.cpp's versions, as their libraries return them. */
#include "../cases.h"
#include "../../tools/llama_params.h"

#define MINUS_1 0xffffffffu
#define F_MINUS_1 0xbf800000u
#define CHOICES MINUS_1, MINUS_1, MINUS_1, MINUS_1
#define ROPE 0, 0, F_MINUS_1, F_MINUS_1, F_MINUS_1, F_MINUS_1, 0, F_MINUS_1
#define SWITCHES 0x1010100, 1

enum { N = 48 };

/* Positions of the words of 4 bytes that kvant sets; 0: the version has no such word. */
static const struct context_case {
    const char *version;
    uint32_t words[N];
    size_t outputs, threads, flash_attention, on_node, type_k, swa_full_byte;
} contexts
    [] = {
        { "ggml 0.10",
          { 512, 2048, 512, 1, 4, 4, CHOICES, ROPE, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, SWITCHES },
          0,
          4,
          9,
          18,
          22,
          116 },
        { "ggml 0.13",
          { 512, 2048, 512, 1, 0, 0, 4, 4, 0, CHOICES, ROPE,    0,
            0,   0,    0,   0, 1, 1, 0, 0, 0, 0,       SWITCHES },
          5,
          6,
          12,
          22,
          26,
          132 },
        { "ggml 0.25",
          { 512, 2048, 512, 1, 0, 0, 1, 4, 4, 0, CHOICES, ROPE,
            0,   0,    0,   0, 1, 1, 0, 0, 0, 0, SWITCHES },
          5,
          7,
          13,
          22,
          26,
          132 },
        { "ggml 0.27",
          { 512, 2048, 512, 1, 0, 0, 1, 4, 4, 0, CHOICES, ROPE,    0,
            0,   0,    0,   1, 1, 0, 0, 0, 0, 0, 0,       SWITCHES },
          5,
          7,
          13,
          22,
          26,
          140 },
    };

static const struct model_case {
    const char *version;
    uint32_t words[N];
    size_t progress;
} models[] = {
    { "ggml 0.10", { 0, 0, 0, 0, MINUS_1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x100, 0x100 }, 10 },
    { "ggml 0.19",
      { 0, 0, 0, 0, MINUS_1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10000, 0xababab00 },
      10 },
    { "ggml 0.25",
      { 0, 0, 0, 0, MINUS_1, 1, MINUS_1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10000, 0 },
      12 },
};

static llama_params given(const uint32_t words[N])
{
    llama_params params;
    memset(&params, 0xab, sizeof params); /* bytes that llama.cpp does not write */
    memcpy(params.bytes, words, N * sizeof *words);
    return params;
}

static uint32_t word(const llama_params *params, size_t i)
{
    uint32_t found;
    memcpy(&found, params->bytes + 4 * i, sizeof found);
    return found;
}

static bool no_progress(float part, void *user)
{
    return true;
}

static bool on_node(struct ggml_tensor *node, bool ask, void *user)
{
    return ask;
}

static const context_settings settings = { .n_ctx = 1001,
                                           .n_batch = 1002,
                                           .n_ubatch = 1003,
                                           .n_outputs = 1004,
                                           .n_threads = 1005,
                                           .flash_attention = LLAMA_FLASH_ATTN_TYPE_ENABLED,
                                           .on_node = on_node,
                                           .type_k = GGML_TYPE_Q8_0,
                                           .type_v = GGML_TYPE_Q4_0 };

CASE(contexts_of_all_versions)
{
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++) {
        const struct context_case *c = &contexts[i];
        llama_params params = given(c->words);
        ggml_backend_sched_eval_callback callback;

        print_message("%s\n", c->version);
        assert_true(context_params(&params, &settings));
        assert_int_equal(word(&params, 0), 1001);
        assert_int_equal(word(&params, 1), 1002);
        assert_int_equal(word(&params, 2), 1003);
        assert_true(c->outputs == 0 || word(&params, c->outputs) == 1004);
        assert_int_equal(word(&params, c->threads), 1005);
        assert_int_equal(word(&params, c->threads + 1), 1005);
        assert_int_equal(word(&params, c->flash_attention), LLAMA_FLASH_ATTN_TYPE_ENABLED);
        assert_int_equal(word(&params, c->flash_attention - 1), MINUS_1);
        memcpy(&callback, params.bytes + 4 * c->on_node, sizeof callback);
        assert_true(callback == on_node);
        assert_int_equal(word(&params, c->type_k), GGML_TYPE_Q8_0);
        assert_int_equal(word(&params, c->type_k + 1), GGML_TYPE_Q4_0);
        assert_int_equal(params.bytes[c->swa_full_byte], 0);
        assert_int_equal(params.bytes[c->swa_full_byte - 1], 1);
    }
}

CASE(models_of_all_versions)
{
    const model_settings model = { .n_gpu_layers = 99, .progress = no_progress };

    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        llama_params params = given(models[i].words);
        llama_progress_callback progress;

        print_message("%s\n", models[i].version);
        assert_true(model_params(&params, &model));
        assert_int_equal(word(&params, 4), 99);
        memcpy(&progress, params.bytes + 4 * models[i].progress, sizeof progress);
        assert_true(progress == no_progress);
    }
}

/* Every word that kvant knows may lie elsewhere in a later version, and is refused then. */
CASE(other_layouts_are_refused)
{
    const struct context_case *c = &contexts[2];
    const size_t places[] = { 0, 1, 2, 3, c->threads, c->flash_attention, c->on_node, c->type_k + 1,
                              32 };
    const size_t of_model[] = { 0, 2, 5, 10, 12, 14, 18 };

    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        llama_params params = given(c->words);
        params.bytes[4 * places[i]] ^= 0x40;
        assert_false(context_params(&params, &settings));
    }
    for (size_t i = 0; i < sizeof of_model / sizeof *of_model; i++) {
        const model_settings model = { .n_gpu_layers = 99 };
        llama_params params = given(models[2].words);
        params.bytes[4 * of_model[i]] ^= 0x40;
        assert_false(model_params(&params, &model));
    }
}

RUN_CASES(NULL, NULL)
