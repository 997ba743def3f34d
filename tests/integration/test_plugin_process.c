/* test_plugin_process.c - states that outlive a process. A new process gives the same answers from
 * a slot's file as a new context of the old process. A state that a killed process wrote in part is
 * refused, and no stored row is lost. */
#define _POSIX_C_SOURCE 200809L /* fork, kill, mkdtemp */
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "harness.h"

enum { N_PROMPT = 500, N_OTHER = 130, N_STEPS = 8, N_CUTS = 12 };

static llama_token tokens[N_PROMPT + N_STEPS];
static char folder[] = "/tmp/kvant_process_XXXXXX", slot_file[64], answer_file[64];

static const char *exact(void)
{
    const char *given = getenv("KVANT_TEST_EXACT");

    return given != NULL ? given : "0";
}

static struct llama_context *context_with(bool ours, const char *in_place)
{
    const harness_options options = {
        .spec = ours ? "" : NULL, .n_ctx = 1024, .n_seq = 2, .unified = true
    };

    setenv("KVANT_EXACT", in_place, 1);
    return harness_context(&options);
}

static struct llama_context *new_context(bool ours)
{
    return context_with(ours, exact());
}

static size_t answer_bytes(void)
{
    return N_STEPS * harness_n_vocab() * sizeof(float);
}

/* Logits of tokens after a prompt of n, which are then removed; the caller frees the logits. */
static float *answer(struct llama_context *context, int n, llama_seq_id seq)
{
    float *logits = malloc(answer_bytes());

    assert_non_null(logits);
    for (int i = 0; i < N_STEPS; i++) {
        harness_decode(context, tokens + N_PROMPT + i, 1, n + i, seq, false);
        memcpy(logits + (size_t)i * harness_n_vocab(), llama_get_logits_ith(context, -1),
               harness_n_vocab() * sizeof(float));
    }
    assert_true(llama_memory_seq_rm(llama_get_memory(context), seq, n, -1));
    return logits;
}

static void prompt(struct llama_context *context, int n, llama_seq_id seq)
{
    for (int i = 0; i < n; i += 100)
        harness_decode(context, tokens + i, n - i < 100 ? n - i : 100, i, seq, false);
}

static void save(struct llama_context *context)
{
    assert_true(llama_state_seq_save_file(context, slot_file, 0, tokens, N_PROMPT) > 0);
}

static void load(struct llama_context *context)
{
    llama_token restored[N_PROMPT];
    size_t n = 0;

    assert_true(llama_state_seq_load_file(context, slot_file, 0, restored, N_PROMPT, &n) > 0);
    assert_int_equal(n, N_PROMPT);
}

static float *answer_from_file(bool ours)
{
    struct llama_context *context = new_context(ours);
    float *logits;

    load(context);
    logits = answer(context, N_PROMPT, 0);
    llama_free(context);
    return logits;
}

/* Another process */

/* Starts this program again, which does one of the two tasks below. */
static pid_t start_process(const char *what)
{
    const pid_t child = fork();

    assert_true(child >= 0);
    if (child == 0) {
        execl("/proc/self/exe", "test_plugin_process", what, folder, (char *)NULL);
        _exit(127);
    }
    return child;
}

static void answer_in_this_process(void)
{
    float *logits = answer_from_file(true);
    FILE *file = fopen(answer_file, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(logits, 1, answer_bytes(), file), answer_bytes());
    assert_int_equal(fclose(file), 0);
    free(logits);
}

static void save_until_killed(void)
{
    struct llama_context *context = new_context(true);

    prompt(context, N_PROMPT, 0);
    for (;;) {
        size_t bytes;
        uint8_t *state = harness_save_state(context, &bytes);
        FILE *file = fopen(slot_file, "wb");
        assert_non_null(file);
        for (size_t at = 0, n; at < bytes; at += n) {
            n = bytes - at < 4096 ? bytes - at : 4096;
            assert_int_equal(fwrite(state + at, 1, n, file), n);
            fflush(file);
        }
        fclose(file);
        free(state);
    }
}

static float *answer_of_new_process(void)
{
    const pid_t child = start_process("answer");
    float *logits = malloc(answer_bytes());
    FILE *file;
    int status;

    assert_non_null(logits);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    file = fopen(answer_file, "rb");
    assert_non_null(file);
    assert_int_equal(fread(logits, 1, answer_bytes(), file), answer_bytes());
    fclose(file);
    return logits;
}

/* Rows of a state are encoded at most once more, which adds an error as large as the first. So the
 * divergence at most doubles. Rounding to fp16 is 1e-5. */
static void a_new_process_answers_alike(void **state)
{
    struct llama_context *context = new_context(false);
    float *stock, *saved, *here, *there;
    double before, after;

    prompt(context, N_PROMPT, 0);
    stock = answer(context, N_PROMPT, 0);
    llama_free(context);
    context = new_context(true);
    prompt(context, N_PROMPT, 0);
    save(context);
    saved = answer(context, N_PROMPT, 0);
    llama_free(context);
    here = answer_from_file(true);
    there = answer_of_new_process();
    assert_memory_equal(here, there, answer_bytes());
    before = harness_mean_kld(stock, saved, N_STEPS);
    after = harness_mean_kld(stock, there, N_STEPS);
    print_message("KLD before the process ended %.6f, in a new one %.6f\n", before, after);
    assert_true(isfinite(after) && after <= 2 * before + 1e-5);
    free(stock);
    free(saved);
    free(here);
    free(there);
}

/* States that are too short */

/* A context with a sequence 1, and answers for it and for a restored sequence 0: of llama.cpp's own
 * cache and of a cache that is compressed from the start. The room for fp16 rows is less than both
 * sequences need. */
typedef struct witness {
    struct llama_context *context;
    float *other[2], *whole[2];
} witness;

static witness new_witness(const uint8_t *state, size_t bytes)
{
    witness w;

    for (int ours = 0; ours < 2; ours++) {
        struct llama_context *context = context_with(ours, "0");
        prompt(context, N_OTHER, 1);
        if (ours)
            assert_int_equal(llama_state_seq_set_data(context, state, bytes, 0), bytes);
        else
            prompt(context, N_PROMPT, 0);
        w.whole[ours] = answer(context, N_PROMPT, 0);
        w.other[ours] = answer(context, N_OTHER, 1);
        llama_free(context);
    }
    w.context = new_context(true);
    prompt(w.context, N_OTHER, 1);
    return w;
}

static void free_witness(witness *w)
{
    llama_free(w->context);
    for (int ours = 0; ours < 2; ours++) {
        free(w->other[ours]);
        free(w->whole[ours]);
    }
}

/* The restored rows replace other rows and are encoded again, which at most doubles the divergence.
 * A lost row would make it many times as large. 1e-5 is as small as rounding. */
static void assert_as_good(float *const before[2], const float *now)
{
    const double a = harness_mean_kld(before[0], before[1], N_STEPS);
    const double b = harness_mean_kld(before[0], now, N_STEPS);

    if (!(b <= 2 * a + 1e-5))
        print_message("KLD %.6f, at first %.6f\n", b, a);
    assert_true(isfinite(b) && b <= 2 * a + 1e-5);
}

static void assert_other_is_there(const witness *w)
{
    const llama_memory_t memory = llama_get_memory(w->context);
    float *other;

    assert_int_equal(llama_memory_seq_pos_max(memory, 1), N_OTHER - 1);
    other = answer(w->context, N_OTHER, 1);
    assert_as_good(w->other, other);
    free(other);
}

/* A refused state may leave cells, which a program removes. */
static void check_cut(const witness *w, const uint8_t *state, size_t cut)
{
    const llama_memory_t memory = llama_get_memory(w->context);

    assert_int_equal(llama_state_seq_set_data(w->context, state, cut, 0), 0);
    assert_true(llama_memory_seq_rm(memory, 0, -1, -1));
    assert_other_is_there(w);
}

static void check_whole(const witness *w, const uint8_t *state, size_t bytes)
{
    float *whole;

    assert_int_equal(llama_state_seq_set_data(w->context, state, bytes, 0), bytes);
    whole = answer(w->context, N_PROMPT, 0);
    assert_as_good(w->whole, whole);
    free(whole);
}

static uint8_t *new_state(size_t *bytes)
{
    struct llama_context *context = new_context(true);
    uint8_t *state;

    prompt(context, N_PROMPT, 0);
    state = harness_save_state(context, bytes);
    llama_free(context);
    return state;
}

/* A process that is killed while it writes leaves a state that ends anywhere. */
static void states_that_end_anywhere_are_refused(void **state)
{
    size_t bytes;
    uint8_t *saved = new_state(&bytes);
    witness w = new_witness(saved, bytes);

    for (size_t i = 0; i < N_CUTS; i++)
        check_cut(&w, saved, bytes / N_CUTS * i);
    check_cut(&w, saved, bytes - 1);
    check_whole(&w, saved, bytes);
    free_witness(&w);
    free(saved);
}

static uint8_t *read_slot(size_t *bytes)
{
    FILE *file = fopen(slot_file, "rb");
    struct stat status;
    uint8_t *data;

    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &status), 0);
    *bytes = (size_t)status.st_size;
    data = malloc(*bytes + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *bytes, file), *bytes);
    fclose(file);
    return data;
}

static void kill_one_that_saves(int milliseconds)
{
    const pid_t child = start_process("save");
    struct stat status;

    while (stat(slot_file, &status) != 0 || status.st_size == 0)
        assert_int_equal(waitpid(child, NULL, WNOHANG), 0);
    nanosleep(&(struct timespec){ .tv_nsec = 1000000L * milliseconds }, NULL);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

static void a_process_is_killed_while_it_saves(void **state)
{
    size_t bytes, n;
    uint8_t *saved = new_state(&bytes);
    witness w = new_witness(saved, bytes);

    for (int i = 0; i < 3; i++) {
        uint8_t *left;
        unlink(slot_file);
        kill_one_that_saves(1 + 7 * i);
        left = read_slot(&n);
        print_message("killed with %zu of %zu bytes written\n", n, bytes);
        if (n == bytes)
            check_whole(&w, left, n);
        else
            check_cut(&w, left, n);
        assert_true(llama_memory_seq_rm(llama_get_memory(w.context), 0, -1, -1));
        free(left);
    }
    free_witness(&w);
    free(saved);
}

static void name_files(void)
{
    snprintf(slot_file, sizeof(slot_file), "%s/slot", folder);
    snprintf(answer_file, sizeof(answer_file), "%s/answer", folder);
}

static int start(void **state)
{
    const int status = harness_start(state);

    if (status == 0)
        harness_tokens(tokens, N_PROMPT + N_STEPS);
    name_files();
    return status;
}

static int start_in_folder(void **state)
{
    return mkdtemp(folder) != NULL ? start(state) : -1;
}

static int stop(void **state)
{
    unlink(slot_file);
    unlink(answer_file);
    rmdir(folder);
    return harness_stop(state);
}

static void do_in_this_process(void **state)
{
    if (strcmp(*state, "answer") == 0)
        answer_in_this_process();
    else
        save_until_killed();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_process_answers_alike),
        cmocka_unit_test(states_that_end_anywhere_are_refused),
        cmocka_unit_test(a_process_is_killed_while_it_saves),
    };

    if (argc > 2) {
        const struct CMUnitTest other[] = {
            cmocka_unit_test_prestate(do_in_this_process, argv[1]),
        };
        snprintf(folder, sizeof(folder), "%s", argv[2]);
        return cmocka_run_group_tests(other, start, harness_stop);
    }
    choose_cases(argc, argv);
    return cmocka_run_group_tests(tests, start_in_folder, stop);
}
