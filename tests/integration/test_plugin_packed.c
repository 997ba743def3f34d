/* test_plugin_packed.c - saved states as programs get them when kvant serves llama.cpp's functions:
 * their sizes, files, and states that are refused. This program calls llama.cpp's functions as any
 * program does, through its own imports. llama.cpp's functions themselves are found by name. */
#define _GNU_SOURCE

#include <dlfcn.h>
#include <signal.h>
#include <sys/resource.h>

#include "saved_fixture.h"
#include "../../integrations/llama.cpp/kv_size.h"
#include "../../integrations/llama.cpp/state_format.h"

static struct {
    size_t (*get_size)(struct llama_context *context, llama_seq_id seq);
    size_t (*get_data)(struct llama_context *context, uint8_t *to, size_t size, llama_seq_id seq);
    size_t (*set_data)(struct llama_context *context, const uint8_t *from, size_t size,
                       llama_seq_id seq);
    size_t (*save_file)(struct llama_context *context, const char *path, llama_seq_id seq,
                        const llama_token *of, size_t n);
    size_t (*load_file)(struct llama_context *context, const char *path, llama_seq_id seq,
                        llama_token *to, size_t room, size_t *n);
} stock;

static void find(const char *name, void *slot)
{
    void *found = dlsym(RTLD_DEFAULT, name);

    assert_non_null(found);
    memcpy(slot, &found, sizeof(found));
}

static int start(void **state)
{
    setenv("KVANT_STATES", "codes", 1);
    if (harness_start(state) != 0)
        return -1;
    harness_tokens(tokens, MOST);
    find("llama_state_seq_get_size", &stock.get_size);
    find("llama_state_seq_get_data", &stock.get_data);
    find("llama_state_seq_set_data", &stock.set_data);
    find("llama_state_seq_save_file", &stock.save_file);
    find("llama_state_seq_load_file", &stock.load_file);
    return 0;
}

static const char *const specs[] = { "trellis-4:transform=first", "turboquant-4",
                                     "int-4:axis=channel,group=32,sink=4,recent=64", "" };

enum { N_SPECS = sizeof(specs) / sizeof(specs[0]) };

static harness_options two(const char *spec)
{
    return (harness_options){ .spec = spec, .n_ctx = 2048, .n_seq = 2, .unified = true };
}

static void make_path(char *path)
{
    const int file = mkstemp(path);

    assert_true(file >= 0);
    close(file);
}

/* The bytes of a file; the caller frees them. */
static uint8_t *read_file(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    uint8_t *bytes;

    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *n = (size_t)ftell(file);
    rewind(file);
    bytes = malloc(*n + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *n, file), *n);
    fclose(file);
    return bytes;
}

static void write_file(const char *path, const uint8_t *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void assert_continues(struct llama_context *context, llama_seq_id seq, const float *expected)
{
    float *logits = continue_from(context, N_PROMPT, seq);

    assert_memory_equal(expected, logits, logits_bytes());
    free(logits);
}

/* In memory and in files, for a sequence and for all, in the same context and in another one. */
CASE(restored_logits_have_the_same_bits)
{
    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options options = two(specs[i]);
        struct llama_context *context = prompted(&options, N_PROMPT);
        char of_one[] = "/tmp/kvant_one_XXXXXX", of_all[] = "/tmp/kvant_all_XXXXXX";
        llama_token read[N_PROMPT];
        saved one = save(context, 0);
        size_t all_bytes = llama_state_get_size(context), n = 0;
        uint8_t *all = malloc(all_bytes);
        float *original;

        make_path(of_one);
        make_path(of_all);
        assert_true(one.size < stock.get_size(context, 0));
        assert_int_equal(llama_state_get_data(context, all, all_bytes), all_bytes);
        assert_true(llama_state_seq_save_file(context, of_one, 0, tokens, N_PROMPT) > one.size);
        assert_true(llama_state_save_file(context, of_all, tokens, N_PROMPT));
        original = continue_from(context, N_PROMPT, 0);
        assert_int_equal(restore(context, &one, 1), one.size);
        assert_continues(context, 1, original);
        llama_free(context);
        context = harness_context(&options);
        assert_int_equal(restore(context, &one, 1), one.size);
        assert_continues(context, 1, original);
        assert_true(llama_state_seq_load_file(context, of_one, 0, NULL, 0, &n) > 0);
        assert_int_equal(n, N_PROMPT);
        assert_true(llama_state_seq_load_file(context, of_one, 0, read, N_PROMPT, &n) > one.size);
        assert_memory_equal(read, tokens, sizeof(read));
        assert_continues(context, 0, original);
        llama_free(context);
        for (int from_file = 0; from_file < 2; from_file++) {
            context = harness_context(&options);
            if (from_file)
                assert_true(llama_state_load_file(context, of_all, read, N_PROMPT, &n));
            else
                assert_int_equal(llama_state_set_data(context, all, all_bytes), all_bytes);
            assert_continues(context, 0, original);
            llama_free(context);
        }
        unlink(of_one);
        unlink(of_all);
        drop(&one);
        free(all);
        free(original);
    }
}

/* A server with one slot keeps the state of a prompt in memory while it answers another one. The
 * other prompt has taken the prompt's first cells, some of them, or more cells. */
CASE(a_slot_gets_its_prompt_back)
{
    static const int n_other[] = { 1, 3, 130, 500 };

    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options one = { .spec = specs[i], .n_ctx = 1024 };
        struct llama_context *context = prompted(&one, N_PROMPT);
        saved s = save(context, 0);
        float *original = continue_from(context, N_PROMPT, 0);

        for (size_t k = 0; k < sizeof(n_other) / sizeof(n_other[0]); k++) {
            assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
            harness_decode(context, tokens + 700, n_other[k], 0, 0, false);
            assert_int_equal(restore(context, &s, 0), s.size);
            assert_continues(context, 0, original);
        }
        llama_free(context);
        drop(&s);
        free(original);
    }
}

/* An answer is discarded and the state of its prompt comes back. The answer's first tokens are in
 * the prompt's last block, and its later tokens have pushed a block out of the exact part. The
 * sequence is alone, next to another one, and in a stream. */
CASE(a_prompt_without_its_answer_comes_back)
{
    static const harness_options caches[] = { { .n_ctx = 1024 },
                                              { .n_ctx = 2048, .n_seq = 2, .unified = true },
                                              { .n_ctx = 2048, .n_seq = 2 } };
    enum { N = 444 }; /* 4 slots of its last block are free */

    for (size_t i = 0; i < N_SPECS; i++)
        for (size_t k = 0; k < sizeof(caches) / sizeof(caches[0]); k++) {
            harness_options options = caches[k];
            struct llama_context *context;
            saved s;
            float *original;

            options.spec = specs[i];
            context = prompted(&options, N);
            if (options.n_seq > 1)
                harness_decode(context, tokens + 5, N_OTHER, 0, 1, false);
            s = save(context, 0);
            original = continue_from(context, N, 0);
            for (int again = 0; again < 2; again++) {
                assert_int_equal(restore(context, &s, 0), s.size);
                assert_continues_after(context, N, 0, original, specs[i]);
            }
            llama_free(context);
            drop(&s);
            free(original);
        }
}

/* The bytes of the cache when `share` of its cells are written: pages, fp16 rows, transforms. */
static double cache_bytes(double share)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), "kvant_kv_size");
    kvp_kv_size size = { .size = sizeof(size) };
    kvp_kv_size_fn *get;

    memcpy(&get, &symbol, sizeof(get));
    assert_true(get(false, &size));
    return (size.bytes - size.exact - size.transforms) * share + size.exact + size.transforms;
}

/* A state takes hardly more than the cache, whose fp16 rows are fp16 in the state, too. */
CASE(states_are_as_small_as_caches)
{
    static const struct {
        const char *preset;
        double most;
    } cases[] = { { "balanced", 1.15 }, { "small", 1.15 }, { "quality", 1.3 } };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const harness_options options = { .spec = "", .n_ctx = 2048 };
        struct llama_context *context;
        char path[] = "/tmp/kvant_size_XXXXXX";
        size_t file, nominal;
        double live;
        saved s;

        setenv("KVANT_PRESET", cases[i].preset, 1);
        context = prompted(&options, 1900);
        live = cache_bytes(1900. / 2048);
        nominal = stock.get_size(context, 0);
        s = save(context, 0);
        make_path(path);
        file = llama_state_seq_save_file(context, path, 0, tokens, 1900);
        print_message("%s: state %zu bytes, file %zu, cache %.0f, as f16 %zu\n", cases[i].preset,
                      s.size, file, live, nominal);
        assert_true((double)s.size < cases[i].most * live);
        assert_true((double)file < cases[i].most * live);
        unlink(path);
        llama_free(context);
        drop(&s);
    }
    unsetenv("KVANT_PRESET");
}

/* A program that asked llama.cpp itself for the size gets the nominal state, and can restore it. */
CASE(room_for_the_nominal_state_gets_it)
{
    const harness_options options = two("trellis-4");
    struct llama_context *context = prompted(&options, N_PROMPT);
    const size_t size = stock.get_size(context, 0);
    uint8_t *data = malloc(size);
    float *original;

    assert_non_null(data);
    assert_int_equal(llama_state_seq_get_data(context, data, size, 0), size);
    original = continue_from(context, N_PROMPT, 0);
    assert_int_equal(llama_state_seq_set_data(context, data, size, 1), size);
    assert_continues(context, 1, original);
    assert_int_equal(llama_state_seq_get_data(context, data, size / 16, 0), 0);
    llama_free(context);
    free(data);
    free(original);
}

/* Files and states that llama.cpp wrote, with its own fp16 rows or with nominal rows of kvant. An
 * exact cache gets llama.cpp's rows with the same bits. Logits are only compared within kvant,
 * because its attention rounds otherwise than llama.cpp's. */
CASE(states_of_llama_cpp_are_restored)
{
    const harness_options plain = { .n_ctx = 2048, .n_seq = 2, .unified = true },
                          exact = two("f16"), codes = two("trellis-4");
    struct llama_context *context = prompted(&plain, N_PROMPT);
    char path[] = "/tmp/kvant_stock_XXXXXX";
    llama_token read[N_PROMPT];
    float *original, *restored;
    uint8_t *theirs, *ours;
    size_t n = 0, size, size_here, at;

    make_path(path);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT) > 0);
    theirs = harness_save_state(context, &size);
    llama_free(context);
    context = harness_context(&exact);
    assert_true(llama_state_seq_load_file(context, path, 1, read, N_PROMPT, &n) > 0);
    ours = harness_save_sequence(context, 1, &size_here);
    assert_int_equal(size_here, size);
    at = harness_rows_at(size, N_PROMPT, false, 0);
    assert_memory_equal(theirs + at, ours + at, size - at);
    restored = continue_from(context, N_PROMPT, 1); /* NaN where a row was refused */
    assert_true(isfinite(harness_rms(restored, N_NEXT * harness_n_vocab())));
    llama_free(context);
    free(theirs);
    free(ours);
    free(restored);
    context = prompted(&codes, N_PROMPT);
    assert_true(stock.save_file(context, path, 0, tokens, N_PROMPT) > 0);
    original = continue_from(context, N_PROMPT, 0);
    assert_true(llama_state_seq_load_file(context, path, 1, read, N_PROMPT, &n) > 0);
    assert_continues(context, 1, original);
    llama_free(context);
    unlink(path);
    free(original);
}

/* A llama.cpp without kvant takes packed states for none of its own. */
CASE(llama_cpp_refuses_packed_states)
{
    const harness_options options = two("trellis-4"), plain = { .n_ctx = 2048 };
    struct llama_context *context = prompted(&options, N_PROMPT);
    char path[] = "/tmp/kvant_packed_XXXXXX";
    saved s = save(context, 0);
    llama_token read[N_PROMPT];
    size_t n = 0;

    make_path(path);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT) > 0);
    llama_free(context);
    context = harness_context(&plain);
    assert_int_equal(stock.set_data(context, s.data, s.size, 0), 0);
    assert_int_equal(stock.load_file(context, path, 0, read, N_PROMPT, &n), 0);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(context), 0), -1);
    llama_free(context);
    unlink(path);
    drop(&s);
}

/* A context of the same program whose cache is llama.cpp's own takes the bytes for its rows,
 * because no buffer can refuse them. Its sequence is empty, so llama.cpp gets the state while it is
 * read, and copies runs that are not there yet. Only states above 4 MiB are read that way. Then the
 * state is restored once more from all of its bytes: the first number of each run is a NaN, and no
 * token gets an answer from zeros. */
CASE(a_cache_of_llama_cpp_gets_no_zeros)
{
    enum { N = 1500 };
    const harness_options options = two("trellis-4"),
                          plain = { .n_ctx = 2048, .n_seq = 2, .unified = true };
    struct llama_context *context = prompted(&options, N);
    char path[] = "/tmp/kvant_zeros_XXXXXX";
    saved s = save(context, 0);
    llama_token read[N];
    size_t n = 0;

    make_path(path);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N) > 0);
    llama_free(context);
    context = harness_context(&plain);
    for (int from_file = 0; from_file < 2; from_file++) {
        float *logits;
        if (from_file)
            assert_true(llama_state_seq_load_file(context, path, 0, read, N, &n) > s.size);
        else
            assert_int_equal(restore(context, &s, 0), s.size);
        assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(context), 0), N - 1);
        logits = continue_from(context, N, 0);
        for (size_t i = 0; i < N_NEXT * harness_n_vocab(); i++)
            assert_true(isnan(logits[i]));
        free(logits);
        assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1));
    }
    llama_free(context);
    unlink(path);
    drop(&s);
}

/* A context with other tokens in sequence 1, and their next logits. */
typedef struct neighbour {
    struct llama_context *context;
    float *undisturbed;
} neighbour;

static neighbour with_neighbour(const char *spec)
{
    const harness_options options = two(spec);
    neighbour n = { .context = harness_context(&options) };

    harness_decode(n.context, tokens, N_OTHER, 0, 1, false);
    n.undisturbed = continue_from(n.context, N_OTHER, 1);
    return n;
}

/* The sequence has no tokens, its prompt can be computed, and the neighbour keeps its bits. */
static void assert_goes_on(const neighbour *n)
{
    struct llama_memory_i *memory = llama_get_memory(n->context);
    float *logits;

    assert_int_equal(llama_memory_seq_pos_max(memory, 0), -1);
    assert_true(llama_memory_seq_rm(memory, 1, N_OTHER, -1));
    logits = continue_from(n->context, N_OTHER, 1);
    assert_memory_equal(n->undisturbed, logits, logits_bytes());
    free(logits);
    harness_decode(n->context, tokens, N_OTHER, 0, 0, false);
    logits = continue_from(n->context, N_OTHER, 0);
    assert_true(isfinite(logits[0]));
    free(logits);
    assert_true(llama_memory_seq_rm(memory, 0, -1, -1));
}

static void neighbour_free(neighbour *n)
{
    llama_free(n->context);
    free(n->undisturbed);
}

/* Bytes of all parts of a state in memory and of a file are damaged, and both are cut short. */
CASE(damaged_states_are_refused)
{
    const harness_options options = two("");
    struct llama_context *context = prompted(&options, N_PROMPT);
    char path[] = "/tmp/kvant_damage_XXXXXX";
    saved s = save(context, 0);
    llama_token read[N_PROMPT];
    size_t bytes, n = 0;
    uint8_t *file;
    neighbour there;

    make_path(path);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT) > 0);
    llama_free(context);
    file = read_file(path, &bytes);
    there = with_neighbour("");
    for (size_t at = 0; at < s.size; at += at < 200 ? 7 : s.size / 23) {
        s.data[at] ^= 0x10;
        assert_int_equal(restore(there.context, &s, 0), 0);
        s.data[at] ^= 0x10;
        assert_int_equal(llama_state_seq_set_data(there.context, s.data, at, 0), 0);
        file[at] ^= 1;
        write_file(path, file, bytes);
        file[at] ^= 1;
        assert_int_equal(llama_state_seq_load_file(there.context, path, 0, read, N_PROMPT, &n), 0);
        write_file(path, file, at);
        assert_int_equal(llama_state_seq_load_file(there.context, path, 0, read, N_PROMPT, &n), 0);
    }
    assert_goes_on(&there);
    write_file(path, file, bytes);
    assert_int_equal(llama_state_seq_load_file(there.context, path, 0, read, N_PROMPT - 1, &n), 0);
    assert_int_equal(llama_state_load_file(there.context, path, read, N_PROMPT, &n), 0);
    assert_goes_on(&there);
    assert_true(llama_state_seq_load_file(there.context, path, 0, read, N_PROMPT, &n) > 0);
    /* a sequence that is there stays */
    file[bytes - sizeof(uint64_t) - 1] ^= 1;
    write_file(path, file, bytes);
    assert_int_equal(llama_state_seq_load_file(there.context, path, 0, read, N_PROMPT, &n), 0);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(there.context), 0), N_PROMPT - 1);
    neighbour_free(&there);
    unlink(path);
    free(file);
    drop(&s);
}

/* Other codecs refuse rows after llama.cpp has given them cells, and take the cells back. A state
 * whose rows have their nominal length is no different. */
CASE(foreign_states_are_refused)
{
    const harness_options options = two("trellis-4:transform=first");
    struct llama_context *context = prompted(&options, N_PROMPT);
    char path[] = "/tmp/kvant_foreign_XXXXXX";
    neighbour there = with_neighbour("turboquant-4");
    const size_t size = stock.get_size(context, 0);
    uint8_t *nominal = malloc(size);
    saved s = save(context, 0);
    llama_token read[N_PROMPT];
    size_t n = 0;

    make_path(path);
    assert_int_equal(stock.get_data(context, nominal, size, 0), size);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT) > 0);
    assert_int_equal(restore(there.context, &s, 0), 0);
    assert_goes_on(&there);
    assert_int_equal(llama_state_seq_load_file(there.context, path, 0, read, N_PROMPT, &n), 0);
    assert_goes_on(&there);
    assert_int_equal(llama_state_seq_set_data(there.context, nominal, size, 0), 0);
    assert_goes_on(&there);
    neighbour_free(&there);
    llama_free(context);
    unlink(path);
    free(nominal);
    drop(&s);
}

/* A file that cannot be written: its folder is missing, or the disk is full. The old file stays. */
static void replace_a_file(void)
{
    const harness_options options = two("trellis-4");
    struct llama_context *context = prompted(&options, N_PROMPT);
    char path[] = "/tmp/kvant_whole_XXXXXX", part[64];
    struct rlimit before, full = { 20000, 20000 };
    size_t bytes, after;
    uint8_t *file, *again;

    make_path(path);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT) > 0);
    file = read_file(path, &bytes);
    harness_decode(context, tokens + N_PROMPT, 1, N_PROMPT, 0, false);
    assert_int_equal(llama_state_seq_save_file(context, "/tmp/no/folder/at/all", 0, tokens, 1), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    full.rlim_max = before.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
    assert_int_equal(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    again = read_file(path, &after);
    assert_int_equal(bytes, after);
    assert_memory_equal(file, again, bytes);
    snprintf(part, sizeof(part), "%s.kvant-part", path);
    assert_int_equal(access(part, F_OK), -1);
    free(again);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_PROMPT) > 0);
    again = read_file(path, &after);
    assert_false(bytes == after && memcmp(file, again, bytes) == 0);
    free(file);
    free(again);
    unlink(path);
    llama_free(context);
}

CASE(files_are_replaced_as_a_whole)
{
    replace_a_file();
}

/* The state of a cache in place is not packed, and llama.cpp writes its file. */
CASE(files_of_f16_rows_are_replaced_as_a_whole)
{
    setenv("KVANT_EXACT", "auto", 1);
    replace_a_file();
    setenv("KVANT_EXACT", "0", 1);
}

/* KVANT_STATES=auto saves codes here, and rows not. */
CASE(settings_choose)
{
    const harness_options options = two("trellis-4");
    size_t sizes[2], i = 0;

    for (const char *const *text = (const char *const[]){ "auto", "rows", NULL }; *text != NULL;
         text++, i++) {
        struct llama_context *context;
        setenv("KVANT_STATES", *text, 1);
        context = prompted(&options, N_PROMPT);
        sizes[i] = llama_state_seq_get_size(context, 0);
        assert_int_equal(sizes[i] == stock.get_size(context, 0), i == 1);
        llama_free(context);
    }
    assert_true(2 * sizes[0] < sizes[1]);
    setenv("KVANT_STATES", "codes", 1);
}

RUN_CASES(start, harness_stop)
