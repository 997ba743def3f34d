/* test_plugin_signals.c - threads of the plug-in in a program that handles signals. The test runs
 * on the mock of a GPU, where threads learn from a prompt.
 *
 * This program's pthread_create comes before the C library's, for the plug-in, too. It notes what
 * the plug-in does with its signal mask. */
#define _GNU_SOURCE

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "harness.h"

#define EXPORTED __attribute__((visibility("default")))

enum { N_PROMPT = 150, N_STEPS = 8 };

static atomic_int n_threads, n_open; /* threads of the plug-in; threads that do not block signals */

static void next(const char *name, void *function)
{
    void *symbol = dlsym(RTLD_NEXT, name);
    memcpy(function, &symbol, sizeof symbol);
}

static bool in_plugin(void *address)
{
    Dl_info info;
    return dladdr(address, &info) != 0 && strstr(info.dli_fname, "ggml-kvant") != NULL;
}

EXPORTED int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                            void *(*run)(void *), void *argument)
{
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    sigset_t blocked;
    next("pthread_create", &create);
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    if (in_plugin(__builtin_return_address(0))) {
        atomic_fetch_add(&n_threads, 1);
        if (!sigismember(&blocked, SIGUSR1) || !sigismember(&blocked, SIGTERM) ||
            sigismember(&blocked, SIGSEGV))
            atomic_fetch_add(&n_open, 1);
    }
    return create(thread, attributes, run, argument);
}

static int start(void **state)
{
    harness_need_gpu();
    return harness_start(state);
}

/* A prompt that the default preset learns from. */
static void learn(void)
{
    struct llama_context *context = harness_context(&(harness_options){ .spec = "", .n_ctx = 512 });
    llama_token tokens[N_PROMPT + N_STEPS];
    harness_tokens(tokens, N_PROMPT + N_STEPS);
    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    for (int i = 0; i < N_STEPS; i++)
        harness_decode(context, tokens + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
    llama_free(context);
}

CASE(threads_block_the_programs_signals)
{
    learn();
    assert_true(atomic_load(&n_threads) > 0);
    assert_int_equal(atomic_load(&n_open), 0);
}

RUN_CASES(start, harness_stop)
