/* test_plugin_at_once.c - two contexts of a process compute at the same time on two threads: on one
 * GPU, and in the computer's memory. Each thread makes its context and frees it, and the context
 * gives the bits that it gives alone. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <pthread.h>

#include "harness.h"

enum { N_CLIENTS = 2, N_TEXT = 400, N_PROMPT = 290, N_STEPS = 12, N_PARTS = 3, N_CTX = 512 };

static llama_token tokens[N_CLIENTS * N_TEXT];

typedef struct client {
    struct llama_context *context;
    const llama_token *text;
    int pos;
    float *logits, *next;
} client;

static void steps(client *c)
{
    const size_t n = harness_n_vocab();

    for (int i = 0; i < N_STEPS; i++, c->pos++, c->next += n) {
        harness_decode(c->context, c->text + c->pos, 1, c->pos, 0, false);
        memcpy(c->next, llama_get_logits_ith(c->context, -1), n * sizeof(float));
    }
}

static void prompt(client *c)
{
    for (; c->pos < N_PROMPT; c->pos += 145)
        harness_decode(c->context, c->text + c->pos, 145, c->pos, 0, false);
}

static void drop(client *c)
{
    const llama_memory_t memory = llama_get_memory(c->context);

    llama_memory_seq_rm(memory, 0, 100, 130);
    llama_memory_seq_add(memory, 0, 130, -1, -30);
    c->pos -= 30;
}

static void restore(client *c)
{
    size_t size;
    uint8_t *state = harness_save_state(c->context, &size);

    llama_memory_clear(llama_get_memory(c->context), true);
    llama_state_seq_set_data(c->context, state, size, 0);
    free(state);
}

/* A context's life: more rows than fit in place, a removed message, a state that is saved and
 * restored. */
static void *work(void *user)
{
    const harness_options options = { .spec = "", .n_ctx = N_CTX };
    client *c = user;

    c->context = harness_context(&options);
    c->pos = 0;
    c->next = c->logits;
    prompt(c);
    steps(c);
    drop(c);
    steps(c);
    restore(c);
    steps(c);
    llama_free(c->context);
    return NULL;
}

static size_t logits_bytes(void)
{
    return N_PARTS * N_STEPS * harness_n_vocab() * sizeof(float);
}

static void start_clients(client *clients)
{
    for (int i = 0; i < N_CLIENTS; i++) {
        clients[i] = (client){ .text = tokens + i * N_TEXT, .logits = malloc(logits_bytes()) };
        assert_non_null(clients[i].logits);
    }
}

CASE(both_give_the_bits_that_each_gives_alone)
{
    client alone[N_CLIENTS], together[N_CLIENTS];
    pthread_t threads[N_CLIENTS];

    start_clients(alone);
    for (int i = 0; i < N_CLIENTS; i++)
        work(&alone[i]);
    start_clients(together);
    for (int i = 0; i < N_CLIENTS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work, &together[i]), 0);
    for (int i = 0; i < N_CLIENTS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < N_CLIENTS; i++) {
        assert_memory_equal(alone[i].logits, together[i].logits, logits_bytes());
        free(alone[i].logits);
        free(together[i].logits);
    }
}

static int start(void **state)
{
    const char *exact = getenv("KVANT_TEST_EXACT");
    int status;

    setenv("KVANT_EXACT", exact != NULL ? exact : "0", 1);
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, N_CLIENTS * N_TEXT);
    return status;
}

RUN_CASES(start, harness_stop)
