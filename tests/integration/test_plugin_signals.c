/* test_plugin_signals.c - threads and semaphores of the plug-in in a program that handles signals.
 * The test runs on the mock of a GPU, where threads learn from a prompt.
 *
 * This program's pthread_create, sem_wait and sem_post come before the C library's, for the
 * plug-in, too. They note what the plug-in does with its signal mask, and interrupt each wait once,
 * as a handler without SA_RESTART does. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#define EXPORTED __attribute__((visibility("default")))

enum { N_PROMPT = 150, N_STEPS = 8, MOST_SEMAPHORES = 64 };

static atomic_int n_threads, n_open; /* threads of the plug-in; threads that do not block signals */

/* Permits of a semaphore that threads of the plug-in took and gave back. */
static struct {
    sem_t *of;
    int taken, given;
} permits[MOST_SEMAPHORES];
static pthread_mutex_t permits_lock = PTHREAD_MUTEX_INITIALIZER;

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

static void note_permit(sem_t *semaphore, int taken, int given)
{
    int i = 0;
    pthread_mutex_lock(&permits_lock);
    while (i < MOST_SEMAPHORES - 1 && permits[i].of != NULL && permits[i].of != semaphore)
        i++;
    permits[i].of = semaphore;
    permits[i].taken += taken;
    permits[i].given += given;
    pthread_mutex_unlock(&permits_lock);
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

EXPORTED int sem_wait(sem_t *semaphore)
{
    static _Thread_local bool interrupted;
    int (*wait)(sem_t *);
    next("sem_wait", &wait);
    if (!in_plugin(__builtin_return_address(0)))
        return wait(semaphore);
    interrupted = !interrupted;
    if (interrupted) {
        errno = EINTR;
        return -1;
    }
    int status = wait(semaphore);
    if (status == 0)
        note_permit(semaphore, 1, 0);
    return status;
}

EXPORTED int sem_trywait(sem_t *semaphore)
{
    int (*try)(sem_t *);
    next("sem_trywait", &try);
    int status = try(semaphore);
    if (status == 0 && in_plugin(__builtin_return_address(0)))
        note_permit(semaphore, 1, 0);
    return status;
}

EXPORTED int sem_post(sem_t *semaphore)
{
    int (*post)(sem_t *);
    next("sem_post", &post);
    if (in_plugin(__builtin_return_address(0)))
        note_permit(semaphore, 0, 1);
    return post(semaphore);
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

static void threads_block_the_programs_signals(void **state)
{
    (void)state;
    learn();
    assert_true(atomic_load(&n_threads) > 0);
    assert_int_equal(atomic_load(&n_open), 0);
}

/* A wait that a signal ended took no permit, so none may be given back for it. Otherwise more
 * threads than the limit would learn at once. A permit is kept when its semaphore is destroyed. */
static void interrupted_waits_take_no_permit(void **state)
{
    (void)state;
    assert_non_null(permits[0].of);
    for (int i = 0; i < MOST_SEMAPHORES && permits[i].of != NULL; i++)
        assert_true(permits[i].given <= permits[i].taken);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(threads_block_the_programs_signals),
                                        cmocka_unit_test(interrupted_waits_take_no_permit) };
    return cmocka_run_group_tests(tests, start, harness_stop);
}
