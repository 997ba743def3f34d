/* test_plugin_trace.c - KVANT_TRACE in a real llama.cpp: the cells of one conversation that is
 * written, shortened, shifted, saved, restored and copied. Every line is known in advance, because
 * llama.cpp gives a token the next free cell. */
#define _POSIX_C_SOURCE 200809L /* mkstemp, setenv */

#include <unistd.h>

#include "harness.h"

enum { N_CTX = 512, N_TOKENS = 100 };

static char path[] = "/tmp/kvant_trace_XXXXXX";
static long read_so_far;
static llama_token tokens[N_TOKENS];

/* Returns the lines that the file got since the last call, without the numbers of the cache and of
 * the step. */
static const char *new_lines(void)
{
    static char found[4096];
    char line[1024], kind, rest[1024];
    FILE *file = fopen(path, "r");

    assert_non_null(file);
    fseek(file, read_so_far, SEEK_SET);
    found[0] = '\0';
    while (fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "%c %*u %*u %1000[^\n]", &kind, rest) == 2) {
            const size_t used = strlen(found);
            snprintf(found + used, sizeof(found) - used, "%c %s\n", kind, rest);
        }
    read_so_far = ftell(file);
    fclose(file);
    return found;
}

CASE(one_conversation)
{
    struct llama_context *context =
        harness_context(&(harness_options){ .spec = "turboquant-4", .n_ctx = N_CTX });
    llama_memory_t memory = llama_get_memory(context);
    uint8_t *saved;
    size_t size;

    new_lines();
    harness_decode(context, tokens, N_TOKENS, 0, 0, false);
    assert_string_equal(new_lines(), "o 1 512 - - -\ns 0 256 0+100 0+100 0+100\n");
    /* the trace does not show it; the cells are written again */
    llama_memory_seq_rm(memory, 0, 70, -1);
    harness_decode(context, tokens, 1, 70, 0, false);
    assert_string_equal(new_lines(), "s 0 256 70+1 70+1 0+71\n");
    llama_memory_seq_rm(memory, 0, 10, 20);
    llama_memory_seq_add(memory, 0, 20, -1, -10);
    harness_decode(context, tokens, 1, 61, 0, false);
    assert_string_equal(new_lines(), "k 0 0 20+51 -10*51 -\ns 0 256 10+1 61+1 0+11,20+51\n");
    saved = harness_save_state(context, &size);
    llama_memory_clear(memory, true);
    assert_string_equal(new_lines(), "z 0 0 - - -\n");
    assert_int_not_equal(llama_state_seq_set_data(context, saved, size, 0), 0);
    harness_decode(context, tokens, 1, 62, 0, false);
    assert_string_equal(new_lines(), "w 0 0 0+62 - -\ns 0 256 62+1 62+1 0+63\n");
    free(saved);
    llama_free(context);
    assert_string_equal(new_lines(), "x 0 0 - - -\n");
}

/* The second stream becomes a copy of the first. A graph of two streams has two lines. */
CASE(two_streams)
{
    struct llama_context *context = harness_context(
        &(harness_options){ .spec = "turboquant-4", .n_ctx = 2 * N_CTX, .n_seq = 2 });
    struct llama_batch batch = llama_batch_init(2, 0, 1);

    new_lines();
    harness_decode(context, tokens, 5, 0, 0, false);
    llama_memory_seq_cp(llama_get_memory(context), 0, 1, -1, -1);
    for (int32_t i = 0; i < 2; i++)
        harness_add(&batch, tokens[i], 5, i, true);
    assert_int_equal(harness_decode_batch(context, batch), 0);
    assert_string_equal(new_lines(), "o 2 512 - - -\ns 0 256 0+5 0+5 0+5\np 1 0 - - -\n"
                                     "s 0 256 5+1 5+1 0+6\ns 1 256 5+1 5+1 0+6\n");
    llama_free(context);
}

static int start(void **state)
{
    const int file = mkstemp(path);
    int status;

    if (file < 0 || close(file) != 0 || setenv("KVANT_TRACE", path, 1) != 0)
        return -1;
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, N_TOKENS);
    return status;
}

static int stop(void **state)
{
    unlink(path);
    return harness_stop(state);
}

RUN_CASES(start, stop)
