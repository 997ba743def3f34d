#define _POSIX_C_SOURCE 200809L /* setenv, dup, fileno */
/* test_plugin_in_place_layers.c - caches on GPUs whose layers go from f16 in place to compressed
 * pages one after the other (gpu/hand_over.c): each goes once, answers before are f16's, and what
 * llama.cpp does to a cache between two layers loses no row. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../choose.h"
#include "harness.h"

/* All codecs have room for 256 of 1024 cells. The model has 4 layers. So on one GPU the first layer
 * goes before the token in cell 252, because 3 cells are left behind it, and the last one before
 * the token in 255. Of two GPUs the first one has a cache with 3 of the layers: the model's output is the
 * other one's fifth layer. */
#define N_CTX 1024
#define ROOM 256
#define EXACT "256"
#define N_LAYERS 4
#define PROMPT 224
#define N_TEXT 500

static llama_token tokens[N_TEXT];

static int start(void **state)
{
    int result = harness_start(state);

    harness_need_gpu();
    if (result == 0) {
        harness_tokens(tokens, N_TEXT);
        assert_int_equal(llama_model_n_layer(harness_model()), N_LAYERS);
    }
    return result;
}

/* Of the first GPU. */
static int n_layers(void)
{
    return harness_gpus() > 1 ? 3 : N_LAYERS;
}

static int first_to_go(void)
{
    return ROOM - n_layers();
}

static struct llama_context *new_context(const char *spec, const char *exact, uint32_t n_seq)
{
    const harness_options options = {
        .spec = spec, .n_ctx = N_CTX, .n_seq = n_seq, .unified = n_seq > 1
    };

    setenv("KVANT_EXACT", exact, 1);
    return harness_context(&options);
}

static float *room_for(int n)
{
    float *logits = malloc((size_t)n * harness_n_vocab() * sizeof(*logits));

    assert_non_null(logits);
    return logits;
}

/* Tokens first .. first + n - 1 of the text, in steps of `step`; out NULL: no logits are kept. */
static void feed(struct llama_context *context, int first, int n, int step, llama_pos pos,
                 llama_seq_id seq, float *out)
{
    for (int i = 0, some; i < n; i += some) {
        some = n - i < step ? n - i : step;
        harness_decode(context, tokens + first + i, some, pos + i, seq, true);
        if (out != NULL)
            memcpy(out + (size_t)i * harness_n_vocab(), llama_get_logits(context),
                   (size_t)some * harness_n_vocab() * sizeof(float));
    }
}

/* On a real GPU ggml-cuda sums in another order than the CPU's stock. KLD is below 1e-5 then. */
static void assert_same(const float *a, const float *b, int n)
{
    if (harness_has_standin())
        assert_memory_equal(a, b, (size_t)n * harness_n_vocab() * sizeof(*a));
    else
        assert_true(harness_mean_kld(a, b, n) < 1e-5);
}

static bool is_same(const float *a, const float *b, int n)
{
    return memcmp(a, b, (size_t)n * harness_n_vocab() * sizeof(*a)) == 0;
}

/* Lines of the plug-in */

static FILE *lines;
static int former_stderr;

static void begin_lines(void)
{
    fflush(stderr);
    lines = tmpfile();
    former_stderr = dup(STDERR_FILENO);
    assert_non_null(lines);
    dup2(fileno(lines), STDERR_FILENO);
    setenv("KVANT_VERBOSE", "1", 1);
}

/* How many say that a layer went; cells: by layer, how many had rows. */
static int end_lines(size_t cells[N_LAYERS])
{
    char line[512];
    int n = 0;

    unsetenv("KVANT_VERBOSE");
    fflush(stderr);
    dup2(former_stderr, STDERR_FILENO);
    close(former_stderr);
    rewind(lines);
    while (fgets(line, sizeof(line), lines) != NULL) {
        const char *at = strstr(line, ": layer ");
        unsigned layer;
        size_t rows;
        if (at == NULL || sscanf(at, ": layer %u went from fp16 to compressed pages, %zu cells",
                                 &layer, &rows) != 2)
            continue;
        assert_true(layer < N_LAYERS);
        cells[layer] = rows;
        n++;
    }
    fclose(lines);
    return n;
}

/* Layers */

static void a_text(struct llama_context *context, float *logits)
{
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed(context, PROMPT, 100, 1, PROMPT, 0, logits);
}

static float *hear(void (*tell)(struct llama_context *context, float *logits), int n,
                   const char *spec, const char *exact, uint32_t n_seq)
{
    struct llama_context *context = new_context(spec, exact, n_seq);
    float *logits = room_for(n);

    tell(context, logits);
    llama_free(context);
    return logits;
}

/* Both caches have the same codec for the same rows. While some layers are in place fewer of them
 * have its error. The factor is for centres and open blocks, which differ by when rows came; 1e-5
 * is for KLDs that are as small as rounding. */
static void assert_as_good(const char *what, const float *stock, const float *ours,
                           const float *compressed, int n)
{
    const double a = harness_mean_kld(stock, ours, n);
    const double b = harness_mean_kld(stock, compressed, n);

    print_message("%s: KLD %.6f, compressed from the start %.6f\n", what, a, b);
    assert_true(isfinite(a) && a <= 2 * b + 1e-5);
}

/* Keys of `balanced` wait as fp16 in a cache that is compressed from the start. Its codec has 4
 * bits and a matrix, so it is as good as 4 bits without one. */
static void layers_go_one_by_one(void **state)
{
    static const struct {
        const char *spec, *reference;
    } cases[] = { { "int-8", "int-8" },
                  { "turboquant-4", "turboquant-4" },
                  { "", "turboquant-4" } };
    const int before = first_to_go() - PROMPT, full = ROOM - PROMPT;
    const size_t first = (size_t)before * harness_n_vocab();
    const size_t last = (size_t)full * harness_n_vocab();
    float *stock = hear(a_text, 100, NULL, "0", 1);

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        float *compressed = hear(a_text, 100, cases[i].reference, "0", 1), *ours;
        size_t cells[N_LAYERS] = { 0 };
        begin_lines();
        ours = hear(a_text, 100, cases[i].spec, EXACT, 1);
        assert_int_equal(end_lines(cells), N_LAYERS);
        for (int layer = 0; layer < N_LAYERS; layer++)
            assert_int_equal(cells[layer],
                             layer < n_layers() ? first_to_go() + layer : ROOM - 1);
        assert_same(stock, ours, before);
        assert_false(is_same(stock + first, ours + first, 1));
        assert_as_good(cases[i].spec, stock + first, ours + first, compressed + first,
                       n_layers());
        assert_as_good(cases[i].spec, stock + last, ours + last, compressed + last, 100 - full);
        free(ours);
        free(compressed);
    }
    free(stock);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_go_one_by_one),
    };

    choose_cases(argc, argv);
    return cmocka_run_group_tests(tests, start, harness_stop);
}
