#define _POSIX_C_SOURCE 200809L /* setenv, dup, fileno */
/* test_plugin_in_place_layers.c - caches on GPUs whose layers go from f16 in place to compressed
 * pages one after the other (gpu/hand_over.c): each goes once, answers before are f16's, and what
 * llama.cpp does to a cache between two layers loses no row. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../choose.h"
#include "harness.h"

/* All codecs have room for 256 of 1024 cells. The model has 4 layers. So on one GPU the first layer
 * goes before the token in cell 252, because 3 cells are left behind it, and the last one before
 * the token in 255. With two GPUs the first GPU has a cache with 3 of the layers, because llama.cpp
 * counts the model's output as a fifth layer. */
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

/* Layers of the first GPU's cache. */
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

static void end_lines(void)
{
    unsetenv("KVANT_VERBOSE");
    fflush(stderr);
    dup2(former_stderr, STDERR_FILENO);
    close(former_stderr);
    rewind(lines);
}

/* How many say that a layer went; cells: by layer, how many had rows. *ready: how many had rows
 * when the last transform came in force; 0: no line says that. */
static int end_layers(size_t cells[N_LAYERS], size_t *ready)
{
    char line[512];
    int n = 0;

    *ready = 0;
    end_lines();
    while (fgets(line, sizeof(line), lines) != NULL) {
        const char *at = strstr(line, ": layer ");
        const char *settled = strstr(line, "transforms are in force, ");
        unsigned layer;
        size_t rows;
        if (settled != NULL)
            assert_int_equal(sscanf(settled, "transforms are in force, %zu cells", ready), 1);
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

/* Keys of a preset wait as fp16 in a cache that is compressed from the start. Its codec has 4 bits
 * or more and a matrix, so it is as good as 4 bits without one. Values of `quality` have a centre.
 */
static void layers_go_one_by_one(void **state)
{
    static const struct {
        const char *spec, *reference, *preset;
    } cases[] = { { "int-8", "int-8", NULL },
                  { "turboquant-4", "turboquant-4", NULL },
                  { "", "turboquant-4", "balanced" },
                  { "", "turboquant-4", "quality" } };
    const int before = first_to_go() - PROMPT, full = ROOM - PROMPT;
    const size_t first = (size_t)before * harness_n_vocab();
    const size_t last = (size_t)full * harness_n_vocab();
    float *stock = hear(a_text, 100, NULL, "0", 1);

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        float *compressed = hear(a_text, 100, cases[i].reference, "0", 1), *ours;
        size_t cells[N_LAYERS] = { 0 }, ready;
        begin_lines();
        if (cases[i].preset != NULL)
            setenv("KVANT_PRESET", cases[i].preset, 1);
        ours = hear(a_text, 100, cases[i].spec, EXACT, 1);
        unsetenv("KVANT_PRESET");
        assert_int_equal(end_layers(cells, &ready), N_LAYERS);
        assert_in_range(ready, 1, first_to_go() - 1);
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

static void a_full_cache(struct llama_context *context, float *logits)
{
    feed(context, 0, 500, 100, 0, 0, NULL);
    feed(context, 0, 490, 100, 500, 0, NULL);
    feed(context, 100, N_CTX - 990, 1, 990, 0, logits);
}

/* Pages of 16 bits have room for all cells, so nothing is ever compressed. */
static void a_cache_that_fits_stays(void **state)
{
    float *stock = hear(a_full_cache, N_CTX - 990, NULL, "0", 1), *ours;
    size_t cells[N_LAYERS], ready;

    (void)state;
    begin_lines();
    ours = hear(a_full_cache, N_CTX - 990, "f16", "auto", 1);
    assert_int_equal(end_layers(cells, &ready), 0);
    assert_int_equal(ready, 0);
    assert_same(stock, ours, N_CTX - 990);
    free(stock);
    free(ours);
}

/* Threads that make matrices take as long as they take. */
static void results_depend_on_no_clock(void **state)
{
    float *first = hear(a_text, 100, "", EXACT, 1), *second = hear(a_text, 100, "", EXACT, 1);

    (void)state;
    assert_same(first, second, 100);
    free(first);
    free(second);
}

/* Whether the lines of a context's start say this. */
static bool is_told(const char *spec, const char *exact, const char *what)
{
    char line[512];
    bool found = false;

    begin_lines();
    llama_free(new_context(spec, exact, 1));
    end_lines();
    while (fgets(line, sizeof(line), lines) != NULL)
        found = found || strstr(line, what) != NULL;
    fclose(lines);
    return found;
}

static void the_start_line_says_what_happens(void **state)
{
    (void)state;
    assert_true(is_told("", EXACT,
                        "; f16 itself for the first 252 of 1024 tokens, then 4.2 bits with the "
                        "first 64 and newest 64 tokens exact"));
    assert_true(is_told("f16", "auto", "; f16 itself for all 1024 tokens"));
    assert_false(is_told("", "0", "f16 itself"));
}

/* Between two layers */

#define HALF (ROOM - 2) /* cells that are written when a cache has two layers in place */

static void feed_half(struct llama_context *context)
{
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed(context, PROMPT, HALF - PROMPT, 1, PROMPT, 0, NULL);
}

static void tokens_again(struct llama_context *context, float *logits)
{
    feed_half(context);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, HALF - 20, -1));
    feed(context, HALF - 20, 60, 1, HALF - 20, 0, logits);
}

static void a_prompt(struct llama_context *context, float *logits)
{
    feed_half(context);
    feed(context, HALF, 60, 60, HALF, 0, logits);
}

/* Steps of few tokens, more of them than cells are left, and of two sequences. */
static void drafts(struct llama_context *context, float *logits)
{
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed(context, 300, 12, 6, 0, 1, NULL);
    feed(context, PROMPT, 60, 7, PROMPT, 0, logits);
}

static void a_shift(struct llama_context *context, float *logits)
{
    llama_memory_t memory = llama_get_memory(context);

    feed_half(context);
    assert_true(llama_memory_seq_rm(memory, 0, 20, 80));
    llama_memory_seq_add(memory, 0, 80, -1, -60);
    feed(context, HALF, 60, 1, HALF - 60, 0, logits);
}

static void a_saved_text(struct llama_context *context, float *logits)
{
    size_t size;
    uint8_t *saved;

    feed_half(context);
    saved = harness_save_state(context, &size);
    llama_memory_clear(llama_get_memory(context), true);
    assert_int_equal(llama_state_seq_set_data(context, saved, size, 0), size);
    feed(context, HALF, 60, 1, HALF, 0, logits);
    free(saved);
}

/* Rows of a prompt that never fit are no empty cache when most of them are gone. */
static void a_shortened_prompt(struct llama_context *context, float *logits)
{
    feed(context, 0, ROOM + 50, ROOM + 50, 0, 0, NULL);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, 100, -1));
    feed(context, 100, 60, 1, 100, 0, logits);
}

/* Rows of a sequence that is NaN go to pages, and come while some layers are in place. */
static void feed_nan(struct llama_context *context, llama_pos pos)
{
    const int width = llama_model_n_embd(harness_model());
    struct llama_batch batch = llama_batch_init(1, width, 1);

    batch.n_tokens = 1;
    for (int i = 0; i < width; i++)
        batch.embd[i] = NAN;
    batch.pos[0] = pos;
    batch.n_seq_id[0] = 1;
    batch.seq_id[0][0] = 1;
    batch.logits[0] = 0;
    assert_int_equal(llama_decode(context, batch), 0);
    llama_batch_free(batch);
}

static void a_broken_sequence(struct llama_context *context, float *logits)
{
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed_nan(context, 0);
    feed(context, PROMPT, HALF - 1 - PROMPT, 1, PROMPT, 0, NULL);
    feed_nan(context, 1);
    feed(context, HALF - 1, 60, 1, HALF - 1, 0, logits);
}

/* A second sequence is restored while some layers are in place. */
static void a_restored_sequence(struct llama_context *context, float *logits)
{
    size_t size;
    uint8_t *saved;

    feed(context, 300, 40, 40, 0, 0, NULL);
    saved = harness_save_state(context, &size);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
    feed_half(context);
    assert_int_equal(llama_state_seq_set_data(context, saved, size, 1), size);
    feed(context, 340, 30, 1, 40, 1, logits);
    feed(context, HALF, 30, 1, HALF, 0, logits + 30 * harness_n_vocab());
    free(saved);
}

/* The latter two have open pages; `balanced` is trellis-4 with matrices. */
static void no_row_is_lost_between_layers(void **state)
{
    static const char *const specs[] = { "int-8", "trellis-4", "" };
    float *compressed = NULL;
    static const struct {
        const char *name;
        void (*tell)(struct llama_context *context, float *logits);
        uint32_t n_seq;
    } stories[] = { { "tokens again", tokens_again, 1 },
                    { "a prompt", a_prompt, 1 },
                    { "drafts", drafts, 2 },
                    { "a shift", a_shift, 1 },
                    { "a saved text", a_saved_text, 1 },
                    { "a restored sequence", a_restored_sequence, 2 },
                    { "a shortened prompt", a_shortened_prompt, 1 },
                    { "a broken sequence", a_broken_sequence, 2 } };

    (void)state;
    for (size_t i = 0; i < sizeof(stories) / sizeof(*stories); i++) {
        float *stock = hear(stories[i].tell, 60, NULL, "0", stories[i].n_seq);
        for (size_t spec = 0; spec < sizeof(specs) / sizeof(*specs); spec++) {
            float *ours = hear(stories[i].tell, 60, specs[spec], EXACT, stories[i].n_seq);
            if (spec < 2) {
                free(compressed);
                compressed = hear(stories[i].tell, 60, specs[spec], "0", stories[i].n_seq);
            }
            assert_as_good(stories[i].name, stock, ours, compressed, 60);
            free(ours);
        }
        free(stock);
    }
    free(compressed);
}

/* Rows of a state: keys of all layers, then values of all layers, at its end. */
static const uint8_t *rows_in_state(const uint8_t *saved, size_t size, size_t row, int tensor)
{
    const size_t head = 12; /* their type and size */

    return saved + size - (size_t)(2 * N_LAYERS - tensor) * (head + HALF * row) + head;
}

/* Steps encode rows and give up pages while layers are in place: nothing of that touches these. The
 * tokens before the first layer went have the same rows as in llama.cpp's own cache. */
static void layers_in_place_stay_as_they_are(void **state)
{
    const struct llama_model *model = harness_model();
    const size_t row = (size_t)(llama_model_n_embd(model) / llama_model_n_head(model) *
                                llama_model_n_head_kv(model)) *
                       sizeof(uint16_t);
    uint8_t *saved[2];
    size_t size[2];

    (void)state;
    if (!harness_has_standin())
        skip();
    for (int i = 0; i < 2; i++) {
        struct llama_context *context = new_context(i == 0 ? NULL : "", i == 0 ? "0" : EXACT, 1);
        feed_half(context);
        saved[i] = harness_save_state(context, &size[i]);
        llama_free(context);
    }
    assert_int_equal(size[0], size[1]);
    for (int i = 0; i < 2 * N_LAYERS; i++) {
        const bool in_place = i % N_LAYERS == n_layers() - 1 || i % N_LAYERS == n_layers() - 2;
        const uint8_t *a = rows_in_state(saved[0], size[0], row, i);
        const uint8_t *b = rows_in_state(saved[1], size[1], row, i);
        assert_int_equal(memcmp(a, b, (size_t)first_to_go() * row) == 0,
                         in_place || i % N_LAYERS >= n_layers());
    }
    free(saved[0]);
    free(saved[1]);
}

static void a_cleared_cache(struct llama_context *context, float *logits)
{
    feed_half(context);
    llama_memory_clear(llama_get_memory(context), true);
    feed(context, 300, 60, 7, 0, 0, logits);
}

/* llama-server empties its slots in this way alone. */
static void a_new_conversation(struct llama_context *context, float *logits)
{
    feed_half(context);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
    feed(context, 300, 40, 40, 0, 0, logits);
    feed(context, 340, 20, 1, 40, 0, logits + 40 * harness_n_vocab());
}

static void new_conversations_are_exact(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        float *stock = hear(i == 0 ? a_cleared_cache : a_new_conversation, 60, NULL, "0", 1);
        float *ours = hear(i == 0 ? a_cleared_cache : a_new_conversation, 60, "", EXACT, 1);
        assert_same(stock, ours, 60);
        free(stock);
        free(ours);
    }
}

/* Two contexts, whose steps alternate: one has layers in both forms, the other begins. */
static void contexts_have_forms_of_their_own(void **state)
{
    struct llama_context *stock = new_context(NULL, "0", 1), *first, *second;
    float *of_first = room_for(60), *of_second = room_for(60), *expected = room_for(60);
    float *compressed = hear(a_prompt, 60, "int-8", "0", 1);

    (void)state;
    first = new_context("int-8", EXACT, 1);
    second = new_context("int-8", EXACT, 1);
    feed_half(first);
    for (size_t i = 0; i < 60; i++) {
        feed(first, HALF + (int)i, 1, 1, HALF + (int)i, 0, of_first + i * harness_n_vocab());
        feed(second, (int)i, 1, 1, (int)i, 0, of_second + i * harness_n_vocab());
    }
    feed(stock, 0, 60, 1, 0, 0, expected);
    assert_same(expected, of_second, 60);
    feed(stock, 60, HALF - 60, 100, 60, 0, NULL);
    feed(stock, HALF, 60, 1, HALF, 0, expected);
    assert_as_good("beside another context", expected, of_first, compressed, 60);
    llama_free(first);
    llama_free(second);
    llama_free(stock);
    free(of_first);
    free(of_second);
    free(expected);
    free(compressed);
}

/* Of the stand-in: "standin_direct" counts parts of graphs that were computed, not as part of a
 * captured graph; "standin_synchronized" counts waits. */
static unsigned long counter(const char *name)
{
    const unsigned long *n =
        ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("CUDA"), name);

    assert_non_null(n);
    return *n;
}

/* llama.cpp does not wait for the graph before it clears a cache. */
static void graphs_are_waited_for(void **state)
{
    struct llama_context *context;
    unsigned long before;

    (void)state;
    if (!harness_has_standin())
        skip();
    context = new_context("int-8", EXACT, 1);
    feed(context, 0, 100, 100, 0, 0, NULL);
    before = counter("standin_synchronized");
    llama_memory_clear(llama_get_memory(context), true);
    assert_true(counter("standin_synchronized") > before);
    llama_free(context);
}

/* The first step with pages may bring others to capture once more, which takes two steps: the GPU
 * has memory for slots only then. The layers leave their graphs alone. */
static void other_contexts_keep_their_graphs(void **state)
{
    struct llama_context *first, *other;
    const int n = ROOM + 4 - PROMPT;
    int n_again = 0;

    (void)state;
    if (!harness_has_standin())
        skip();
    first = new_context("int-8", EXACT, 1);
    other = new_context("int-8", "0", 1);
    setenv("KVANT_EXACT", EXACT, 1); /* the stand-in asks whether a cache may be in place */
    feed(first, 0, PROMPT, 100, 0, 0, NULL);
    feed(other, 0, 4, 1, 0, 0, NULL);
    for (int i = 0; i < n; i++) {
        const unsigned long before = counter("standin_direct");
        feed(other, 4 + i, 1, 1, 4 + i, 0, NULL);
        n_again += counter("standin_direct") > before;
        feed(first, PROMPT + i, 1, 1, PROMPT + i, 0, NULL);
    }
    print_message("steps that were not replayed again: %d\n", n_again);
    assert_true(n_again <= 2);
    llama_free(first);
    llama_free(other);
}

/* Memory */

static bool try_token(struct llama_context *context, int pos, float *logits)
{
    struct llama_batch batch = llama_batch_get_one(tokens + pos, 1);

    if (llama_decode(context, batch) != 0)
        return false;
    memcpy(logits, llama_get_logits_ith(context, -1), harness_n_vocab() * sizeof(*logits));
    return true;
}

static size_t bytes_on_gpus(void)
{
    size_t (*bytes)(void);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "host_bytes");

    assert_non_null(symbol);
    memcpy(&bytes, &symbol, sizeof(symbol));
    return bytes();
}

/* A hand-over stores a tensor's rows from a copy, 2048 rows at a time as fp32. */
static void memory_is_given_back(void **state)
{
    const size_t least = 2048 * 128 * sizeof(float);

    (void)state;
    if (!harness_has_standin())
        skip();
    for (int clear = 0; clear < 2; clear++) {
        struct llama_context *context = new_context("int-8", EXACT, 1);
        size_t half;
        feed_half(context);
        half = bytes_on_gpus();
        if (clear)
            llama_memory_clear(llama_get_memory(context), true);
        feed(context, HALF, 6, 1, clear ? 0 : HALF, 0, NULL);
        assert_true(bytes_on_gpus() + least <= half);
        llama_free(context);
    }
}

/* While rows fit nobody needs the memory. The first token that does not fit is refused, and no
 * other try is needed than one with memory. */
static void layers_wait_for_memory(void **state)
{
    struct llama_context *context;
    float *stock = hear(a_text, 100, NULL, "0", 1), *ours = room_for(100);
    float *compressed = hear(a_text, 100, "int-8", "0", 1);
    const int full = ROOM - PROMPT;
    const size_t behind = (size_t)full * harness_n_vocab();

    (void)state;
    if (!harness_has_standin())
        skip();
    context = new_context("int-8", EXACT, 1);
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    setenv("KVANT_TEST_NO_MEMORY", "1", 1);
    for (int i = 0; i < full; i++)
        assert_true(try_token(context, PROMPT + i, ours + (size_t)i * harness_n_vocab()));
    assert_same(stock, ours, full);
    assert_false(try_token(context, ROOM, ours + behind));
    unsetenv("KVANT_TEST_NO_MEMORY");
    for (int i = full; i < 100; i++)
        assert_true(try_token(context, PROMPT + i, ours + (size_t)i * harness_n_vocab()));
    assert_as_good("after a try without memory", stock + behind, ours + behind,
                   compressed + behind, 100 - full);
    llama_free(context);
    free(stock);
    free(ours);
    free(compressed);
}

/* One allocation fails, from the token before the first layer goes on. A token that is refused
 * comes again. */
static bool fail_at(int allocation, const float *stock, const float *compressed)
{
    struct llama_context *context = new_context("", EXACT, 1);
    float *ours = room_for(40);
    const int from = ROOM - 6;
    char number[16];
    bool failed;

    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed(context, PROMPT, from - PROMPT, 1, PROMPT, 0, NULL);
    snprintf(number, sizeof(number), "%d", allocation);
    setenv("KVANT_TEST_NO_MEMORY_AT", number, 1);
    for (int i = 0; i < 40; i++) {
        float *logits = ours + (size_t)i * harness_n_vocab();
        assert_true(try_token(context, from + i, logits) || try_token(context, from + i, logits));
    }
    failed = strcmp(getenv("KVANT_TEST_NO_MEMORY_AT"), "0") == 0;
    unsetenv("KVANT_TEST_NO_MEMORY_AT");
    assert_as_good("one allocation fails", stock, ours, compressed, 40);
    llama_free(context);
    free(ours);
    return failed;
}

static void all_allocations_may_fail(void **state)
{
    float *stock = hear(a_text, 100, NULL, "0", 1);
    float *compressed = hear(a_text, 100, "trellis-4", "0", 1);
    const size_t first = (size_t)(ROOM - 6 - PROMPT) * harness_n_vocab();
    int n = 0;

    (void)state;
    if (!harness_has_standin())
        skip();
    while (fail_at(n + 1, stock + first, compressed + first))
        n++;
    print_message("%d allocations\n", n);
    assert_true(n > 0);
    free(stock);
    free(compressed);
}

/* Models with a sliding window have two caches, whose layers go by themselves. */
static void all_models_do_that(void **state)
{
    static const char *const models[] = { "gemma3", "gemma2", "gpt-oss", "lfm2", "llama80" };

    (void)state;
    for (size_t i = 0; i < sizeof(models) / sizeof(*models); i++) {
        const size_t first = 28;
        float *stock, *ours, *compressed;
        harness_load_tiny(models[i]);
        stock = hear(a_text, 100, NULL, "0", 1);
        ours = hear(a_text, 100, "int-8", EXACT, 1);
        compressed = hear(a_text, 100, "int-8", "0", 1);
        assert_as_good(models[i], stock + first * harness_n_vocab(),
                       ours + first * harness_n_vocab(), compressed + first * harness_n_vocab(),
                       100 - (int)first);
        free(stock);
        free(ours);
        free(compressed);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_go_one_by_one),
        cmocka_unit_test(a_cache_that_fits_stays),
        cmocka_unit_test(results_depend_on_no_clock),
        cmocka_unit_test(the_start_line_says_what_happens),
        cmocka_unit_test(no_row_is_lost_between_layers),
        cmocka_unit_test(layers_in_place_stay_as_they_are),
        cmocka_unit_test(new_conversations_are_exact),
        cmocka_unit_test(contexts_have_forms_of_their_own),
        cmocka_unit_test(other_contexts_keep_their_graphs),
        cmocka_unit_test(graphs_are_waited_for),
        cmocka_unit_test(memory_is_given_back),
        cmocka_unit_test(layers_wait_for_memory),
        cmocka_unit_test(all_allocations_may_fail),
        cmocka_unit_test(all_models_do_that),
    };

    choose_cases(argc, argv);
    return cmocka_run_group_tests(tests, start, harness_stop);
}
