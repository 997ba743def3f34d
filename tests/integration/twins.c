/* twins.c - see twins.h. */
#define _POSIX_C_SOURCE 200809L /* setenv, clock_gettime */

#include "twins.h"

#include <time.h>

#include "kv_size.h"

enum { STOCK, OURS };

twins *twins_new(const harness_options *options, const char *exact)
{
    twins *t = calloc(1, sizeof(*t));
    harness_options stock = *options;

    assert_non_null(t);
    stock.spec = NULL;
    t->options = *options;
    t->n_slots = options->n_seq > 0 ? (int)options->n_seq : 1;
    assert_true(t->n_slots <= TWINS_SLOTS);
    setenv("KVANT_EXACT", exact, 1);
    t->both[STOCK] = harness_context(&stock);
    t->both[OURS] = harness_context(options);
    /* the mock of a GPU reads whether any cache may be in place */
    setenv("KVANT_EXACT", "auto", 1);
    harness_tokens(t->text, TWINS_TEXT);
    for (int s = 0; s < t->n_slots; s++) {
        t->slots[s].held = malloc(options->n_ctx * sizeof(llama_token));
        assert_non_null(t->slots[s].held);
    }
    return t;
}

static void drop_saved(twins_slot *slot)
{
    for (int c = 0; c < 2; c++) {
        free(slot->saved[c]);
        slot->saved[c] = NULL;
    }
}

void twins_free(twins *t)
{
    for (int s = 0; s < t->n_slots; s++) {
        drop_saved(&t->slots[s]);
        free(t->slots[s].held);
    }
    llama_free(t->both[STOCK]);
    llama_free(t->both[OURS]);
    free(t);
}

/* Measurements */

static void *plugin_function(const char *name)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), name);

    assert_non_null(symbol);
    return symbol;
}

static void count_bytes(twins *t)
{
    void *symbol = plugin_function("kvant_kv_memory");
    size_t (*memory)(size_t *reserved);
    double bytes;

    memcpy(&memory, &symbol, sizeof(memory));
    bytes = (double)memory(NULL);
    t->peak = bytes > t->peak ? bytes : t->peak;
}

/* The plug-in counts some memory that its reported size leaves out. In the computer's memory, a
 * tensor shares the system's pages at its two ends. A GPU (test_plugin_size.c) aligns tensors to
 * 256 bytes, has tables of 16 bytes for each token, and 16 KiB for attention's workspace of each
 * token. Copies of a batch go to the threads that learn. */
static double uncounted(const twins *t)
{
    const struct llama_model *model = harness_model();
    const double n_tensors = 2.0 * llama_model_n_layer(model);
    const double head_dim = (double)llama_model_n_embd(model) / llama_model_n_head(model);
    const double heads = llama_model_n_head(model) + llama_model_n_head_kv(model);
    const double copies =
        8.0 * TWINS_BATCH * heads * (head_dim > 128 ? head_dim : 128) * sizeof(float);

    if (!harness_on_gpu())
        return n_tensors * 2 * 4096;
    return n_tensors * 256 + 16.0 * t->options.n_ctx + 16384 + copies;
}

/* Several sequences in a unified cache in the computer's memory take more than kvant reports,
 * because the plug-in does not know how many there are. Then max_tokens / 16 rows may be exact, or
 * 192, and also 512 rows of a step and a block in which rows begin. Sequences have their own
 * blocks. The placement reserves an eighth and 8 blocks more than the tokens fill (placement.h). */
static double sequences(const twins *t, const kvp_kv_size *size)
{
    const double numbers = (size->numbers[0] + size->numbers[1]) / size->cells;
    const double share = size->cells / 16, exact = (share > 192 ? share : 192) + 512 + 64;
    const double blocks = size->cells / 64 / 8 + 8;

    if (harness_on_gpu() || !t->options.unified || t->n_slots == 1)
        return 0;
    return exact * numbers * sizeof(uint16_t) - size->exact +
           blocks * 64 * size->codec_bits / 8 / size->cells;
}

double twins_budget(const twins *t)
{
    void *symbol = plugin_function("kvant_kv_size");
    kvp_kv_size size = { .size = sizeof(size) };
    kvp_kv_size_fn *function;

    memcpy(&function, &symbol, sizeof(function));
    assert_true(function(harness_on_gpu(), &size));
    return size.bytes + size.working + uncounted(t) + sequences(t, &size);
}

/* This thread's CPU time: the thread computes both contexts' graphs, and other processes do not
 * count. */
static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static unsigned long parts_computed(void)
{
    if (!harness_has_mock())
        return 0;
    return *(unsigned long *)ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("CUDA"),
                                                               "mock_direct");
}

/* Checks the positions of all sequences. */
static void check_positions(const twins *t)
{
    const llama_memory_t stock = llama_get_memory(t->both[STOCK]);
    const llama_memory_t ours = llama_get_memory(t->both[OURS]);

    for (int s = 0; s < t->n_slots; s++) {
        assert_int_equal(llama_memory_seq_pos_min(stock, s), llama_memory_seq_pos_min(ours, s));
        assert_int_equal(llama_memory_seq_pos_max(stock, s), llama_memory_seq_pos_max(ours, s));
        assert_int_equal(llama_memory_seq_pos_max(ours, s) + 1,
                         t->slots[s].saved[OURS] != NULL ? 0 : t->slots[s].n);
    }
}

/* Batches */

static void add(struct llama_batch *batch, const twins_slot *slot, int seq, int pos, bool output)
{
    harness_add(batch, slot->held[pos], pos, seq, output);
}

/* The next n tokens of the text belong to the slot. Returns the position of the first. */
static int extend(twins *t, int slot, int n)
{
    twins_slot *s = &t->slots[slot];
    const int first = s->n;

    assert_true(s->n + n <= (int)t->options.n_ctx);
    for (int i = 0; i < n; i++)
        s->held[s->n++] = t->text[t->next++ % TWINS_TEXT];
    return first;
}

/* Decodes the batch in both contexts. Returns kvant's time as a share of llama.cpp's own. */
static double decode(twins *t, struct llama_batch batch)
{
    double times[2];

    for (int c = 0; c < 2; c++) {
        const double before = seconds();
        assert_int_equal(llama_decode(t->both[c], batch), 0);
        llama_synchronize(t->both[c]);
        times[c] = seconds() - before;
    }
    count_bytes(t);
    check_positions(t);
    for (int i = 0; i < batch.n_tokens; i++) {
        const float *logits = batch.logits[i] ? llama_get_logits_ith(t->both[OURS], i) : NULL;
        for (size_t j = 0; logits != NULL && j < harness_n_vocab(); j++)
            assert_true(isfinite(logits[j]));
    }
    return times[OURS] / times[STOCK];
}

static void prompt(twins *t, int slot, int first, int n)
{
    struct llama_batch batch = llama_batch_init(TWINS_BATCH, 0, 1);

    for (int i = 0; i < n; i++) {
        const bool last = i + 1 == n || batch.n_tokens + 1 == TWINS_BATCH;
        add(&batch, &t->slots[slot], slot, first + i, last);
        if (last) {
            decode(t, batch);
            batch.n_tokens = 0;
        }
    }
    llama_batch_free(batch);
}

void twins_prompt(twins *t, int slot, int n)
{
    prompt(t, slot, extend(t, slot, n), n);
}

void twins_step(twins *t, unsigned slots, double *klds)
{
    struct llama_batch batch = llama_batch_init(TWINS_SLOTS, 0, 1);
    const unsigned long parts = parts_computed();

    for (int s = 0; s < t->n_slots; s++)
        if (slots & 1u << s)
            add(&batch, &t->slots[s], s, extend(t, s, 1), true);
    assert_true(t->n_steps < TWINS_STEPS);
    t->times[t->n_steps++] = decode(t, batch);
    t->parts += parts_computed() - parts;
    for (int i = 0; i < batch.n_tokens && klds != NULL; i++)
        klds[i] = harness_mean_kld(llama_get_logits_ith(t->both[STOCK], i),
                                   llama_get_logits_ith(t->both[OURS], i), 1);
    llama_batch_free(batch);
}

/* Removals */

static void remove_tokens(twins *t, int slot, int first, int end)
{
    bool removed[2];

    for (int c = 0; c < 2; c++)
        removed[c] = llama_memory_seq_rm(llama_get_memory(t->both[c]), slot, first, end);
    assert_int_equal(removed[STOCK], removed[OURS]);
    assert_true(removed[OURS]);
}

void twins_draft(twins *t, int slot, int n_drafted, int n_accepted)
{
    const int first = extend(t, slot, n_drafted), end = first + n_accepted;

    prompt(t, slot, first, n_drafted);
    t->slots[slot].n = end;
    t->next -= n_drafted - n_accepted;
    remove_tokens(t, slot, end, -1);
    check_positions(t);
}

void twins_drop(twins *t, int slot, int first, int end)
{
    twins_slot *s = &t->slots[slot];

    remove_tokens(t, slot, first, end);
    for (int c = 0; c < 2; c++)
        llama_memory_seq_add(llama_get_memory(t->both[c]), slot, end, -1, first - end);
    memmove(s->held + first, s->held + end, (size_t)(s->n - end) * sizeof(*s->held));
    s->n -= end - first;
    check_positions(t);
}

void twins_forget(twins *t, int slot)
{
    remove_tokens(t, slot, -1, -1);
    t->slots[slot].n = 0;
    check_positions(t);
}

void twins_save(twins *t, int slot)
{
    twins_slot *s = &t->slots[slot];

    for (int c = 0; c < 2; c++)
        s->saved[c] = harness_save_sequence(t->both[c], slot, &s->saved_size[c]);
    assert_int_equal(s->saved_size[STOCK], s->saved_size[OURS]);
    remove_tokens(t, slot, -1, -1);
    count_bytes(t);
}

void twins_restore(twins *t, int slot)
{
    twins_slot *s = &t->slots[slot];

    for (int c = 0; c < 2; c++)
        assert_int_equal(llama_state_seq_set_data(t->both[c], s->saved[c], s->saved_size[c], slot),
                         s->saved_size[c]);
    drop_saved(s);
    count_bytes(t);
    check_positions(t);
}

/* Cells */

#define ROWS_HEAD 12 /* bytes before the rows of a layer in a state: their type and size */

static size_t row_numbers(void)
{
    const struct llama_model *model = harness_model();

    return (size_t)(llama_model_n_embd(model) / llama_model_n_head(model) *
                    llama_model_n_head_kv(model));
}

/* A state ends with the keys of n cells of all layers, and the values of all layers. */
static size_t rows_bytes(size_t n)
{
    return 2 * (size_t)llama_model_n_layer(harness_model()) *
           (ROWS_HEAD + n * row_numbers() * sizeof(uint16_t));
}

static double number_at(const uint8_t *row, size_t i)
{
    uint16_t half;

    memcpy(&half, row + i * sizeof(half), sizeof(half));
    return ggml_fp16_to_fp32(half);
}

/* The squared error of a row as a share of its squared norm. */
static double error_of_row(const uint8_t *stock, const uint8_t *ours)
{
    double error = 0, norm = 0;

    for (size_t i = 0; i < row_numbers(); i++) {
        const double x = number_at(stock, i), y = number_at(ours, i);
        error += (x - y) * (x - y);
        norm += x * x;
    }
    return error / norm;
}

/* A lost row, or another token's row, differs by its norm or more. 4 bits err by .07 of the norm.
 * After 18 encodings the error is .3. */
static void check_rows(const uint8_t *stock, const uint8_t *ours, size_t n, int slot)
{
    const size_t row = row_numbers() * sizeof(uint16_t), layer = ROWS_HEAD + n * row;
    const size_t n_tensors = 2 * (size_t)llama_model_n_layer(harness_model());

    for (size_t t = 0; t < n_tensors; t++)
        for (size_t i = 0; i < n; i++) {
            const size_t at = t * layer + ROWS_HEAD + i * row;
            const double error = error_of_row(stock + at, ours + at);
            if (!(error < 0.3 * 0.3))
                fail_msg("slot %d, tensor %zu: row %zu of %zu errs by %.3f of its norm", slot, t, i,
                         n, sqrt(error));
        }
}

/* A state begins with the positions and the sequences of its cells, in the order of the cells. It
 * ends with a number for each later stream. A cache with windows is left out, because it has two
 * lists of cells. */
static void check_slot(const twins *t, int slot)
{
    const size_t n = t->slots[slot].saved[OURS] != NULL ? 0 : (size_t)t->slots[slot].n;
    const size_t after = t->options.unified ? 0 : (size_t)(t->n_slots - 1 - slot);
    const size_t behind = rows_bytes(n) + after * sizeof(uint32_t);
    size_t size[2];
    uint8_t *states[2];

    for (int c = 0; c < 2; c++)
        states[c] = harness_save_sequence(t->both[c], slot, &size[c]);
    assert_int_equal(size[STOCK], size[OURS]);
    if (!t->options.window) {
        assert_true(size[OURS] > behind);
        assert_memory_equal(states[STOCK], states[OURS], size[OURS] - behind);
        check_rows(states[STOCK] + size[OURS] - behind, states[OURS] + size[OURS] - behind, n,
                   slot);
    }
    free(states[STOCK]);
    free(states[OURS]);
}

void twins_check_cells(twins *t)
{
    for (int s = 0; s < t->n_slots; s++)
        check_slot(t, s);
}

/* On a GPU, keys that are pending until their first transform are fp16. Two things end that: the
 * tokens are read once, and a state is saved. */
twins *twins_plain(const twins *t)
{
    twins *plain = twins_new(&t->options, "0");
    size_t size;

    for (int again = 0; again < 2; again++) {
        for (int s = 0; s < t->n_slots; s++) {
            const int n = t->slots[s].n;
            plain->slots[s].n = n;
            memcpy(plain->slots[s].held, t->slots[s].held, (size_t)n * sizeof(llama_token));
            prompt(plain, s, 0, n);
        }
        for (int s = 0; s < t->n_slots && again == 0; s++) {
            free(harness_save_sequence(plain->both[OURS], s, &size));
            twins_forget(plain, s);
        }
    }
    plain->next = t->next;
    return plain;
}
