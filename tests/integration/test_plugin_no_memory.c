/* test_plugin_no_memory.c - each allocation of the plug-in fails once: for rows of a step, their
 * plan, fp16 pages, transforms, a hand-over. The step fails with a line that says why, and a second
 * try computes it. No stored row is lost: answers are as good as without a failure. */
#define _GNU_SOURCE /* dl_iterate_phdr, setenv */

#include <errno.h>
#include <link.h>
#include <stdatomic.h>

#include "harness.h"

enum { N_PROMPT = 250, N_STEPS = 12, N_CTX = 512, N_TEXT = N_PROMPT + 3 * N_STEPS };

/* The plug-in's address range: this program serves allocations from there */

static uintptr_t plugin_begin, plugin_end;
static atomic_long until; /* allocations until one fails; 0: none fails */

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
#define EXPORTED __attribute__((visibility("default")))
EXPORTED void *malloc(size_t bytes);
EXPORTED void *calloc(size_t n, size_t bytes);
EXPORTED void *realloc(void *old, size_t bytes);
EXPORTED void *aligned_alloc(size_t alignment, size_t bytes);

static bool fails(const void *caller)
{
    const uintptr_t at = (uintptr_t)caller;
    const long left = atomic_load_explicit(&until, memory_order_relaxed);

    if (left == 0 || at < plugin_begin || at >= plugin_end || atomic_fetch_sub(&until, 1) != 1)
        return false;
    errno = ENOMEM;
    return true;
}

#define CALLER __builtin_return_address(0)

void *malloc(size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_memalign(alignment, bytes);
}

static int note_plugin(struct dl_phdr_info *info, size_t size, void *user)
{
    if (strstr(info->dlpi_name, "libggml-kvant") == NULL)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X) != 0) {
            plugin_begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            plugin_end = plugin_begin + info->dlpi_phdr[i].p_memsz;
        }
    return 1;
}

/* A life */

static llama_token tokens[N_TEXT];

typedef struct life {
    struct llama_context *context;
    int pos, text, seq;
    float *logits, *next;
    int n_refused;
} life;

static bool try_to_decode(life *l, int n)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    int status;

    for (int i = 0; i < n; i++)
        harness_add(&batch, tokens[l->text + i], l->pos + i, l->seq, i + 1 == n);
    status = harness_decode_batch(l->context, batch);
    llama_synchronize(l->context);
    return status == 0;
}

/* Whether kvant printed a line besides the line at the start. The lines go to stderr after all. */
static bool says_why(const harness_lines *lines)
{
    char line[1024];
    bool says = false;

    while (fgets(line, sizeof(line), lines->file) != NULL) {
        fputs(line, stderr);
        says = says || (strncmp(line, "kvant: ", 7) == 0 && strstr(line, "KV cache") == NULL &&
                        strstr(line, "report the model") == NULL);
    }
    fclose(lines->file);
    return says;
}

/* A program removes the rows of a refused step before it tries again. */
static void decode(life *l, int n)
{
    const harness_lines lines = harness_begin_lines();
    const bool done = try_to_decode(l, n);

    harness_end_lines(&lines);
    assert_true(says_why(&lines) || done);
    if (!done) {
        l->n_refused++;
        llama_memory_seq_rm(llama_get_memory(l->context), l->seq, l->pos, -1);
        assert_true(try_to_decode(l, n));
    }
    l->pos += n;
    l->text += n;
}

static void steps(life *l)
{
    for (int i = 0; i < N_STEPS; i++) {
        decode(l, 1);
        memcpy(l->next, llama_get_logits_ith(l->context, -1), harness_n_vocab() * sizeof(float));
        l->next += harness_n_vocab();
    }
}

static void drop(life *l)
{
    const llama_memory_t memory = llama_get_memory(l->context);

    assert_true(llama_memory_seq_rm(memory, 0, 100, 130));
    llama_memory_seq_add(memory, 0, 130, -1, -30);
    l->pos -= 30;
}

/* GPU memory: the mock's variable counts down to the allocation that fails. */
static void fail_on_gpu(long at)
{
    char text[24];

    snprintf(text, sizeof(text), "%ld", at);
    setenv("KVANT_TEST_NO_MEMORY_AT", text, 1);
}

static long left_on_gpu(void)
{
    const long left = strtol(getenv("KVANT_TEST_NO_MEMORY_AT"), NULL, 10);

    unsetenv("KVANT_TEST_NO_MEMORY_AT");
    return left;
}

/* The caller frees the logits of 2 * N_STEPS tokens. failing: number of the allocation that fails;
 * 0: none. */
static bool on_gpu; /* allocations of GPU memory fail */

static life live(const char *spec, const char *exact, long failing)
{
    const harness_options options = { .spec = spec, .n_ctx = N_CTX };
    life l = { .logits = malloc(2 * N_STEPS * harness_n_vocab() * sizeof(float)) };

    assert_non_null(l.logits);
    setenv("KVANT_EXACT", exact, 1);
    l.context = harness_context(&options);
    l.next = l.logits;
    if (on_gpu)
        fail_on_gpu(failing);
    else
        atomic_store(&until, failing);
    decode(&l, N_PROMPT);
    steps(&l);
    drop(&l);
    steps(&l);
    llama_free(l.context);
    return l;
}

static const char *exact(void)
{
    const char *given = getenv("KVANT_TEST_EXACT");

    return given != NULL ? given : "0";
}

/* Fails a sample of the allocations of a life, or all of them on the mock of a GPU. Rows of a
 * repeated step may be encoded twice, which at most doubles the divergence; 1e-5 is as small as
 * rounding. */
CASE(each_allocation_may_fail)
{
    enum { MOST = 1000000, N_TRIES = 60 };
    life stock = live(NULL, "0", 0), plain = live("", "0", 0), whole = live("", exact(), MOST);
    const long n = MOST - atomic_exchange(&until, 0);
    const double kld = harness_mean_kld(stock.logits, plain.logits, 2 * N_STEPS);
    const long n_tries = harness_has_mock() ? n : N_TRIES;
    int n_refused = 0;

    assert_true(n > 0);
    for (long i = 0; i < n_tries; i++) {
        const long failing = 1 + i * n / n_tries;
        life l = live("", exact(), failing);
        const double now = harness_mean_kld(stock.logits, l.logits, 2 * N_STEPS);
        atomic_store(&until, 0);
        n_refused += l.n_refused;
        if (!(isfinite(now) && now <= 2 * kld + 1e-5))
            fail_msg("allocation %ld of %ld: KLD %g, compressed %g", failing, n, now, kld);
        free(l.logits);
    }
    print_message("%ld allocations, %d steps were refused\n", n, n_refused);
    free(stock.logits);
    free(plain.logits);
    free(whole.logits);
}

/* The same for GPU memory that is allocated after the context was created. */
CASE(each_gpu_allocation_may_fail)
{
    enum { MOST = 1000000 };
    life stock, plain, whole;
    double kld;
    long n;
    int n_refused = 0;

    if (!harness_has_mock())
        skip();
    stock = live(NULL, "0", 0);
    plain = live("", "0", 0);
    kld = harness_mean_kld(stock.logits, plain.logits, 2 * N_STEPS);
    on_gpu = true;
    whole = live("", exact(), MOST);
    n = MOST - left_on_gpu();
    assert_true(n > 0 || strcmp(exact(), "0") != 0); /* all rows may fit as f16 */
    for (long failing = 1; failing <= n; failing++) {
        life l = live("", exact(), failing);
        const double now = harness_mean_kld(stock.logits, l.logits, 2 * N_STEPS);
        n_refused += l.n_refused;
        if (!(isfinite(now) && now <= 2 * kld + 1e-5))
            fail_msg("GPU allocation %ld of %ld: KLD %g, compressed %g", failing, n, now, kld);
        free(l.logits);
    }
    on_gpu = false;
    print_message("%ld GPU allocations, %d steps were refused\n", n, n_refused);
    free(stock.logits);
    free(plain.logits);
    free(whole.logits);
}

/* A server restores two slots and goes on. failing: as above, from the first restored byte on. */
static life live_again(const char *spec, const uint8_t *state, size_t size, long failing)
{
    const harness_options options = { .spec = spec, .n_ctx = 2 * N_CTX, .n_seq = 2 };
    life l = { .logits = malloc(2 * N_STEPS * harness_n_vocab() * sizeof(float)) };

    assert_non_null(l.logits);
    setenv("KVANT_EXACT", exact(), 1);
    l.context = harness_context(&options);
    l.next = l.logits;
    atomic_store(&until, failing);
    for (int i = 0; i < 2; i++)
        if (llama_state_seq_set_data(l.context, state, size, i) != size) {
            l.n_refused++;
            assert_int_equal(llama_state_seq_set_data(l.context, state, size, i), size);
        }
    for (l.seq = 0; l.seq < 2; l.seq++) {
        l.pos = l.text = N_PROMPT;
        steps(&l);
    }
    llama_free(l.context);
    return l;
}

/* The state of a prompt; the caller frees it. */
static uint8_t *prompt_state(const char *spec, size_t *size)
{
    const harness_options options = { .spec = spec, .n_ctx = 2 * N_CTX, .n_seq = 2 };
    struct llama_context *context = harness_context(&options);
    uint8_t *state;

    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    *size = llama_state_seq_get_size(context, 0);
    state = malloc(*size);
    assert_non_null(state);
    assert_int_equal(llama_state_seq_get_data(context, state, *size, 0), *size);
    llama_free(context);
    return state;
}

static void fail_each_of_a_restore(const char *states)
{
    enum { MOST = 1000000, N_TRIES = 60 };
    size_t size, stock_size;
    uint8_t *stock_state, *state;
    life stock, whole;
    double kld;
    long n;
    int n_refused = 0;

    setenv("KVANT_STATES", states, 1);
    stock_state = prompt_state(NULL, &stock_size);
    state = prompt_state("", &size);
    stock = live_again(NULL, stock_state, stock_size, 0);
    whole = live_again("", state, size, MOST);
    n = MOST - atomic_exchange(&until, 0);
    kld = harness_mean_kld(stock.logits, whole.logits, 2 * N_STEPS);
    for (long i = 0; i < N_TRIES; i++) {
        const long failing = 1 + i * n / N_TRIES;
        life l = live_again("", state, size, failing);
        const double now = harness_mean_kld(stock.logits, l.logits, 2 * N_STEPS);
        atomic_store(&until, 0);
        n_refused += l.n_refused;
        if (!(isfinite(now) && now <= 2 * kld + 1e-5))
            fail_msg("%s, allocation %ld of %ld: KLD %g, without a failure %g", states, failing, n,
                     now, kld);
        free(l.logits);
    }
    print_message("%s: %ld allocations, %d calls were refused\n", states, n, n_refused);
    free(stock_state);
    free(state);
    free(stock.logits);
    free(whole.logits);
}

/* The same for saved states of rows and of codes. */
CASE(each_allocation_of_a_restore_may_fail)
{
    fail_each_of_a_restore("rows");
    fail_each_of_a_restore("codes");
    unsetenv("KVANT_STATES");
}

static int start(void **state)
{
    const int status = harness_start(state);

    if (status == 0) {
        harness_tokens(tokens, N_TEXT);
        dl_iterate_phdr(note_plugin, NULL);
    }
    return status == 0 && plugin_end > 0 ? 0 : -1;
}

RUN_CASES(start, harness_stop)
