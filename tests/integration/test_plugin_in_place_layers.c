#define _POSIX_C_SOURCE 200809L /* setenv */
/* test_plugin_in_place_layers.c - caches whose layers go from f16 in place to compressed pages one
 * after another (gpu/hand_over.c, cpu_in_place.c). Each layer goes once, answers before that are
 * equal to f16's, and no operation of llama.cpp between two layers loses a row. */
#include "in_place_layers.h"
#include "mock_control.h"

/* Lines of the plug-in */

static harness_lines lines;

static void begin_lines(void)
{
    lines = harness_begin_lines();
    setenv("KVANT_VERBOSE", "1", 1);
}

static void end_lines(void)
{
    unsetenv("KVANT_VERBOSE");
    harness_end_lines(&lines);
}

/* Returns how many lines report that a layer went. For each layer, `cells` gets the number of cells
 * with rows at that time. For the last transform that came in force, *ready gets it, or 0 if no
 * line reports it. */
static int end_layers(size_t cells[N_LAYERS], size_t *ready)
{
    char line[512];
    int n = 0;

    *ready = 0;
    end_lines();
    while (fgets(line, sizeof(line), lines.file) != NULL) {
        const char *at = strstr(line, ": layer ");
        const char *settled = strstr(line, "transforms are learned, ");
        unsigned layer;
        size_t rows;
        assert_null(strstr(line, "no layer has a compressed cache"));
        if (settled != NULL)
            assert_int_equal(sscanf(settled, "transforms are learned, %zu cells", ready), 1);
        if (at == NULL || sscanf(at, ": layer %u went from fp16 to compressed pages, %zu cells",
                                 &layer, &rows) != 2)
            continue;
        assert_true(layer < N_LAYERS);
        cells[layer] = rows;
        n++;
    }
    fclose(lines.file);
    return n;
}

/* Layers */

/* Keys of a preset are pending as fp16 in a cache that is compressed from the start. The preset's
 * codec has 4 bits or more and a matrix, so it is as good as 4 bits without a matrix. Values of
 * `quality` have a centre. */
CASE(layers_go_one_by_one)
{
    static const struct {
        const char *spec, *reference, *preset;
    } cases[] = { { "int-8", "int-8", NULL },
                  { "turboquant-4", "turboquant-4", NULL },
                  { "int-4:axis=channel", "int-4:axis=channel", NULL },
                  { "int-8:axis=channel,norm=first", "int-8", NULL },
                  { "", "turboquant-4", "balanced" },
                  { "", "turboquant-4", "quality" } };
    const int before = first_to_go() - PROMPT, full = ROOM - PROMPT;
    const size_t first = (size_t)before * harness_n_vocab();
    const size_t last = (size_t)full * harness_n_vocab();
    float *stock = hear(a_text, 100, NULL, "0", 1);

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        float *compressed = hear(a_text, 100, cases[i].reference, "0", 1), *ours;
        size_t cells[N_LAYERS] = { 0 }, ready;
        begin_lines();
        if (cases[i].preset != NULL)
            setenv("KVANT_PRESET", cases[i].preset, 1);
        ours = hear(a_text, 100, cases[i].spec, EXACT, 1);
        unsetenv("KVANT_PRESET");
        assert_int_equal(end_layers(cells, &ready), N_LAYERS);
        /* Threads have the time of many tokens, so matrices come in force when the room ends. On a
         * CPU a layer learns when it goes. */
        if (harness_on_gpu())
            assert_in_range(ready, ROOM - 4 * n_layers(), first_to_go() - 1);
        for (int layer = 0; layer < N_LAYERS; layer++)
            assert_int_equal(cells[layer], layer < n_layers() ? first_to_go() + layer : ROOM - 1);
        assert_same(stock, ours, before);
        assert_false(is_same(stock + first, ours + first, 1));
        assert_as_good(cases[i].spec, stock + first, ours + first, compressed + first, n_layers());
        assert_as_good(cases[i].spec, stock + last, ours + last, compressed + last, 100 - full);
        free(ours);
        free(compressed);
    }
    free(stock);
}

/* Prompts whose batches are as long as the room */

enum { N_BATCH = 200, N_AFTER = N_BATCH + 40 };

static void a_long_prompt(struct llama_context *context, float *logits)
{
    feed(context, 0, ROOM, ROOM, 0, 0, NULL);
    feed(context, ROOM, N_BATCH, N_BATCH, ROOM, 0, logits);
    feed(context, ROOM + N_BATCH, 40, 1, ROOM + N_BATCH, 0, logits + N_BATCH * harness_n_vocab());
}

static void a_batch_that_fills_the_room(struct llama_context *context, float *logits)
{
    feed(context, 0, ROOM, ROOM, 0, 0, logits);
}

/* Returns how many layers went after CUDA had got a further part of the graph. */
static int layers_after_parts(void)
{
    char line[512];
    bool part = false;
    int n = 0;

    end_lines();
    while (fgets(line, sizeof(line), lines.file) != NULL) {
        const bool went = strstr(line, "went from fp16 to compressed pages") != NULL;
        n += went && part;
        part = !went && (part || strstr(line, "a part of") != NULL);
    }
    fclose(lines.file);
    return n;
}

/* How often this thread waits for the GPU in a batch. */
static unsigned long waits_of(struct llama_context *context, int first, int n)
{
    const unsigned long before = standin_waits();

    feed(context, first, n, n, first, 0, NULL);
    return standin_waits() - before;
}

/* The first batch fills the room, and its graph lets threads learn. The second batch does not fit.
 * A hand-over before its graph would wait for the threads of all layers while the GPU is idle. So
 * each layer goes in the graph, while CUDA computes the part before the layer's attention. This
 * thread waits for each GPU once when it copies slots, and once when the GPU is idle, before memory
 * is freed. A wait for each layer would be 4 waits in place of the first.
 * Copies of other threads to memory that CUDA does not know would hold CUDA's lock for long. */
CASE(layers_go_in_the_graph_of_a_prompt)
{
    struct llama_context *context;
    unsigned long first, second, copies;

    if (!harness_has_mock())
        skip();
    begin_lines();
    setenv("KVANT_TEST_PARTS", "1", 1);
    context = new_context("", EXACT, 1);
    copies = standin_unknown_copies();
    first = waits_of(context, 0, ROOM);
    second = waits_of(context, ROOM, N_BATCH);
    copies = standin_unknown_copies() - copies;
    llama_free(context);
    unsetenv("KVANT_TEST_PARTS");
    assert_int_equal(layers_after_parts(), N_LAYERS);
    assert_int_equal(copies, 0);
    print_message("%lu waits in the first batch, %lu in the second\n", first, second);
    assert_true(first < N_LAYERS && second < N_LAYERS + (unsigned long)harness_gpus());
}

/* Transforms of positions from 2048 on are due with a prompt's first batch beyond position 3072,
 * which waits for them. If a layer's thread began after the graph in which layers go to
 * pages, the GPU would be idle meanwhile. So the thread begins as soon as the layer has its first
 * transform, before the next layer goes. */
CASE(later_positions_are_learned_in_the_graph)
{
    const harness_options options = { .spec = "", .n_ctx = 4096 };
    const int first = 1900;
    struct llama_context *context;
    char line[512];
    int n = 0, behind = 0;

    if (!harness_on_gpu()) /* a CPU learns while it stores rows */
        skip();
    setenv("KVANT_EXACT", EXACT, 1);
    begin_lines();
    context = harness_context(&options);
    feed(context, 0, ROOM, ROOM, first, 0, NULL);
    feed(context, ROOM, N_BATCH, N_BATCH, first + ROOM, 0, NULL);
    llama_free(context);
    end_lines();
    while (fgets(line, sizeof(line), lines.file) != NULL) {
        n += strstr(line, "learns its transform for positions from 2048 on") != NULL;
        behind += n > 0 && strstr(line, "went from fp16 to compressed pages") != NULL;
    }
    fclose(lines.file);
    assert_int_equal(n, N_LAYERS);
    assert_int_equal(behind, N_LAYERS);
}

CASE(prompts_of_long_batches_are_as_good)
{
    float *stock = hear(a_batch_that_fills_the_room, ROOM, NULL, "0", 1);
    float *ours = hear(a_batch_that_fills_the_room, ROOM, "", EXACT, 1), *compressed, *again;

    if (harness_on_gpu()) /* a CPU stores such a prompt in pages at once */
        assert_same(stock, ours, ROOM);
    free(stock);
    free(ours);
    stock = hear(a_long_prompt, N_AFTER, NULL, "0", 1);
    compressed = hear(a_long_prompt, N_AFTER, "turboquant-4", "0", 1);
    ours = hear(a_long_prompt, N_AFTER, "", EXACT, 1);
    again = hear(a_long_prompt, N_AFTER, "", EXACT, 1);
    assert_as_good("a long prompt", stock, ours, compressed, N_AFTER);
    assert_same(ours, again, N_AFTER);
    free(stock);
    free(ours);
    free(again);
    free(compressed);
}

/* Prompts that end near the end of the room */

enum { N_SOON = 2 * N_LAYERS };
static int cells_left;

static void a_prompt_to_the_end(struct llama_context *context, float *logits)
{
    const int n = ROOM - cells_left;

    harness_decode(context, tokens, n, 0, 0, false);
    memcpy(logits, llama_get_logits_ith(context, -1), harness_n_vocab() * sizeof(*logits));
    for (int i = 0; i < N_SOON; i++) {
        fprintf(stderr, "a token\n");
        feed(context, n + i, 1, 1, n + i, 0, logits + (size_t)(i + 1) * harness_n_vocab());
    }
}

/* The most layers that went before one token. *n: how many went at all. */
static int most_layers_of_a_token(int *n)
{
    char line[512];
    bool token = false;
    int most = 0, now = 0;

    *n = 0;
    end_lines();
    while (fgets(line, sizeof(line), lines.file) != NULL) {
        const bool went = strstr(line, "went from fp16 to compressed pages") != NULL;
        token = token || strstr(line, "a token") != NULL;
        now = strstr(line, "a token") != NULL ? 0 : now + went;
        most = token && now > most ? now : most;
        *n += went;
    }
    fclose(lines.file);
    return most;
}

/* A prompt may fill the room, and its answer is f16's. A token after it has no time for several
 * layers, so these go at the end of the prompt's graph. On a CPU the rows of such a prompt go to
 * pages at once. */
CASE(no_token_takes_several_layers)
{
    if (harness_gpus() > 1)
        skip(); /* the first GPU does not see where a prompt ends */
    for (cells_left = 0; cells_left <= N_LAYERS + 1; cells_left++) {
        const bool stays = harness_on_gpu() || cells_left >= N_LAYERS;
        float *stock = hear(a_prompt_to_the_end, 1 + N_SOON, NULL, "0", 1), *ours, *compressed;
        int most, n;
        begin_lines();
        ours = hear(a_prompt_to_the_end, 1 + N_SOON, "", EXACT, 1);
        most = most_layers_of_a_token(&n);
        print_message("%d cells left: a token takes %d layers\n", cells_left, most);
        assert_int_equal(most, stays && cells_left > 0);
        assert_int_equal(n, stays ? N_LAYERS : 0);
        compressed = hear(a_prompt_to_the_end, 1 + N_SOON, "turboquant-4", "0", 1);
        if (stays)
            assert_same(stock, ours, 1);
        assert_as_good("tokens after it", stock, ours, compressed, 1 + N_SOON);
        free(stock);
        free(ours);
        free(compressed);
    }
}

/* All cells */

/* KVANT_EXACT for all cells. A CPU's room is smaller unless the user asks for more. */
static const char *all_cells(void)
{
    return harness_on_gpu() ? "auto" : "1024";
}

static void a_full_cache(struct llama_context *context, float *logits)
{
    feed(context, 0, 500, 100, 0, 0, NULL);
    feed(context, 0, 490, 100, 500, 0, NULL);
    feed(context, 100, N_CTX - 990, 1, 990, 0, logits);
}

/* Pages of 16 bits have room for all cells, so nothing is ever compressed. */
CASE(a_cache_that_fits_stays)
{
    float *stock = hear(a_full_cache, N_CTX - 990, NULL, "0", 1), *ours;
    size_t cells[N_LAYERS], ready;

    begin_lines();
    ours = hear(a_full_cache, N_CTX - 990, "f16", all_cells(), 1);
    assert_int_equal(end_layers(cells, &ready), 0);
    assert_int_equal(ready, 0);
    assert_same(stock, ours, N_CTX - 990);
    free(stock);
    free(ours);
}

/* Results do not depend on how long the threads need that make matrices. */
CASE(results_depend_on_no_clock)
{
    float *first = hear(a_text, 100, "", EXACT, 1), *second = hear(a_text, 100, "", EXACT, 1);

    assert_same(first, second, 100);
    free(first);
    free(second);
}

/* Whether the lines at a context's start contain `what`. */
static bool is_told(const char *spec, const char *exact, const char *what)
{
    char line[512];
    bool found = false;

    begin_lines();
    llama_free(new_context(spec, exact, 1));
    end_lines();
    while (fgets(line, sizeof(line), lines.file) != NULL)
        found = found || strstr(line, what) != NULL;
    fclose(lines.file);
    return found;
}

CASE(the_start_line_says_what_happens)
{
    assert_true(is_told("", EXACT,
                        "; f16 itself for the first 252 of 1024 tokens, then 4.2 bits with the "
                        "first 64 and newest 64 tokens exact"));
    assert_true(is_told("f16", all_cells(), "; f16 itself for all 1024 tokens"));
    assert_false(is_told("", "0", "f16 itself"));
}

/* Between two layers */

static void tokens_again(struct llama_context *context, float *logits)
{
    feed_half(context);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, HALF - 20, -1));
    feed(context, HALF - 20, 60, 1, HALF - 20, 0, logits);
}

/* Short steps, steps with more tokens than cells are left, and steps of two sequences. */
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

/* A prompt that never fit is shortened. The cache still has rows, so it does not count as empty. */
static void a_shortened_prompt(struct llama_context *context, float *logits)
{
    feed(context, 0, ROOM + 50, ROOM + 50, 0, 0, NULL);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, 100, -1));
    feed(context, 100, 60, 1, 100, 0, logits);
}

/* Rows of a sequence of NaNs go to pages, and are written while some layers are in place. */
static void feed_nan(struct llama_context *context, llama_pos pos)
{
    const int width = llama_model_n_embd(harness_model());
    struct llama_batch batch = llama_batch_init(1, width, 1);

    for (int i = 0; i < width; i++)
        batch.embd[i] = NAN;
    harness_add(&batch, 0, pos, 1, false);
    assert_int_equal(harness_decode_batch(context, batch), 0);
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

/* The last three specs have exact pages. `balanced` is trellis-4 with matrices. With groups of
 * several tokens, a cache that is compressed from the start keeps the last block of every batch
 * exact. So the reference is trellis-4 instead. Groups of 32 numbers in 16 levels err by .0062 of
 * the variance, trellis-4 errs by .0050. */
CASE(no_row_is_lost_between_layers)
{
    static const char *const specs[] = { "int-8", "trellis-4", "", "int-4:axis=channel" };
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

/* Steps encode rows and give up pages while layers are in place, and must not change the rows of
 * these layers. Tokens before the first layer went have the same rows as in llama.cpp's own
 * cache. */
CASE(layers_in_place_stay_as_they_are)
{
    const size_t row = harness_row_bytes();
    uint8_t *saved[2];
    size_t size[2];

    if (!harness_has_mock())
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
        const size_t at = harness_rows_at(size[0], HALF, i >= N_LAYERS, (size_t)(i % N_LAYERS));
        assert_int_equal(memcmp(saved[0] + at, saved[1] + at, (size_t)first_to_go() * row) == 0,
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

/* llama-server empties its slots only in this way. */
static void a_new_conversation(struct llama_context *context, float *logits)
{
    feed_half(context);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
    feed(context, 300, 40, 40, 0, 0, logits);
    feed(context, 340, 20, 1, 40, 0, logits + 40 * harness_n_vocab());
}

CASE(new_conversations_are_exact)
{
    for (int i = 0; i < 2; i++) {
        float *stock = hear(i == 0 ? a_cleared_cache : a_new_conversation, 60, NULL, "0", 1);
        float *ours = hear(i == 0 ? a_cleared_cache : a_new_conversation, 60, "", EXACT, 1);
        assert_same(stock, ours, 60);
        free(stock);
        free(ours);
    }
}

/* Models with a sliding window have two caches, and each hands over its own layers. */
CASE(all_models_do_that)
{
    static const char *const models[] = { "gemma3", "gemma2", "gpt-oss", "lfm2", "llama80" };

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

RUN_CASES(start, harness_stop)
