/* test_plugin_aborted.c - graphs that a program aborts (llama_set_abort_callback). A server does so
 * when a client goes away. llama.cpp then removes the tokens of the graph, and the same tokens get
 * the same answers afterwards. Rows move on two threads, which belong to one of two pools or which
 * ggml starts for each graph. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#define N_TEXT 408
#include <kvant/kvant.h>

#include "in_place_fixture.h"

#define PROMPT 100
#define N_TRIES 2 /* graphs before the graph that is not aborted */

static int left; /* calls of the callback until it aborts; below 0: it does not */

static bool aborts(void *user)
{
    (void)user;
    return left >= 0 && left-- == 0;
}

static struct ggml_threadpool *pools[2];

/* Threads and pool of the i-th step: two pools, or none. */
static void change_threads(struct llama_context *context, int i)
{
    llama_detach_threadpool(context);
    llama_set_n_threads(context, 2, 2);
    if (i % 3 != 2)
        llama_attach_threadpool(context, pools[i % 3], pools[i % 3]);
}

static int try(struct llama_context *context, int first, int n)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);

    for (int i = 0; i < n; i++)
        harness_add(&batch, tokens[first + i], first + i, 0, true);
    return harness_decode_batch(context, batch);
}

/* Decodes n tokens after n_tries graphs that the program aborts after some nodes, or never. The
 * tokens of a complete graph are removed. Returns how many graphs were aborted. */
static int decode_after(struct llama_context *context, int first, int n, int n_tries, bool never,
                        int *step)
{
    int aborted = 0;

    for (int i = 0; i < n_tries; i++) {
        change_threads(context, (*step)++);
        left = never ? -1 : (*step * 7 + i * 13) % 60;
        if (try(context, first, n) == 0) {
            assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, first, -1));
            continue;
        }
        aborted++;
        assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(context), 0), first - 1);
    }
    left = -1;
    change_threads(context, (*step)++);
    assert_int_equal(try(context, first, n), 0);
    return aborted;
}

/* Prompts, each with two single tokens after it. Returns the logits of all tokens. */
static float *read_text(const char *spec, const char *exact, int n_tries, bool never,
                        int *n_aborted)
{
    struct llama_context *context = new_context(spec, exact, 1);
    float *logits = harness_new_logits(N_TEXT);
    const size_t n_vocab = harness_n_vocab();
    int step = 0;

    *n_aborted = 0;
    llama_set_abort_callback(context, aborts, NULL);
    for (int at = 0, n; at < N_TEXT; at += n) {
        n = at % (PROMPT + 2) == 0 ? PROMPT : 1;
        *n_aborted += decode_after(context, at, n, n_tries, never, &step);
        memcpy(logits + (size_t)at * n_vocab, llama_get_logits(context),
               (size_t)n * n_vocab * sizeof(*logits));
    }
    llama_free(context);
    return logits;
}

/* Codecs give the same codes again. But a row whose block was sealed during a graph is encoded
 * twice. Also, matrices are learned from the queries of all graphs. So the context that is compared
 * computes the same graphs to their ends, and then removes their tokens. */
static void assert_aborts_cost_nothing(const char *spec, const char *exact)
{
    int n;
    float *removed = read_text(spec, exact, N_TRIES, true, &n),
          *stock = read_text(NULL, "0", 0, true, &n),
          *aborted = read_text(spec, exact, N_TRIES, false, &n);
    const double a = harness_mean_kld(stock, removed, N_TEXT),
                 b = harness_mean_kld(stock, aborted, N_TEXT);

    print_message("%s, exact=%s: %d aborted, KLD %.6f, removed %.6f\n", spec, exact, n, b, a);
    assert_true(n > 10);
    assert_true(b <= 1.3 * a);
    free(aborted);
    free(removed);
    free(stock);
}

/* The cache has room for 256 cells in place, and then goes to pages. */
CASE(aborted_graphs_cost_no_rows)
{
    assert_aborts_cost_nothing("int-8", "300");
    assert_aborts_cost_nothing("", "0");
}

/* kvant limits ggml's threads to the CPUs, and ggml's sums depend on the number of threads. */
CASE(rows_in_place_are_f16s_after_aborted_graphs)
{
    float *stock, *aborted;
    int n;

    if (kvant_available_cpus() < 2)
        skip();
    stock = read_text(NULL, "0", 0, true, &n);
    aborted = read_text("f16", "1024", N_TRIES, false, &n);
    assert_true(n > 10);
    assert_same(stock, aborted, N_TEXT);
    free(aborted);
    free(stock);
}

static int start(void **state)
{
    int result = start_with_text(state);

    for (int i = 0; i < 2 && result == 0; i++)
        pools[i] = harness_new_pool(2);
    return result;
}

static int stop(void **state)
{
    for (int i = 0; i < 2; i++)
        harness_free_pool(pools[i]);
    return harness_stop(state);
}

RUN_CASES(start, stop)
