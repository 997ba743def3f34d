/* test_pack.c - packed states: every byte damaged, every length cut, every number of bytes after
 * which a process that writes a file is killed, and sizes that cannot be. */
#define _GNU_SOURCE /* mkdtemp, fork, setrlimit */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../integrations/llama.cpp/host.h"
#include "../../integrations/llama.cpp/pack.h"

enum { N = 1000, N_TOKENS = 3 };

static const int32_t tokens[N_TOKENS] = { 7, -1, 1 << 20 };
static char folder[] = "/tmp/kvant_pack_XXXXXX";
static char path[64], part[80];

static int start(void **state)
{
    (void)state;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof(path), "%s/state", folder);
    snprintf(part, sizeof(part), "%s.kvant-part", path);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    unlink(path);
    unlink(part);
    return rmdir(folder);
}

/* A state with runs at its begin, in its middle and at its end. Its bytes depend on a seed. */
static kvp_plain make(int seed)
{
    static const kvp_pack_run runs[] = { { 0, 41, 100 }, { 100, 50, 51 }, { 700, 63, 300 } };
    kvp_plain plain;

    assert_true(kvp_plain_create(&plain, N));
    for (int i = 0; i < N; i++)
        plain.bytes[i] = (uint8_t)(1 + (i * 7 + seed) % 251);
    for (size_t i = 0; i < 3; i++) {
        const kvp_pack_run *run = &runs[i];
        memset(plain.bytes + run->at + run->kept, 0, run->room - run->kept);
        assert_true(kvp_plain_add(&plain, run->at, run->kept, run->room));
    }
    return plain;
}

static uint8_t *pack(const kvp_plain *plain, size_t *n)
{
    uint8_t *packed;

    *n = kvp_pack_bytes(plain, 0);
    packed = malloc(*n);
    assert_non_null(packed);
    kvp_pack(plain, packed);
    return packed;
}

static void assert_is(const kvp_plain *expected, const kvp_plain *plain)
{
    assert_int_equal(plain->n, expected->n);
    assert_int_equal(plain->n_runs, expected->n_runs);
    assert_memory_equal(plain->bytes, expected->bytes, expected->n);
}

/* The seed of the file's state, or -1 if there is none that is whole. */
static int seed_of_file(int n_seeds)
{
    int32_t read[N_TOKENS];
    kvp_pack_tokens to = { read, N_TOKENS, 0 };
    FILE *file = kvp_host_open(path, false);
    kvp_plain plain;
    const char *why;

    if (file == NULL)
        return -1;
    why = kvp_pack_load(file, false, &plain, &to);
    fclose(file);
    if (why != NULL)
        return -1;
    assert_int_equal(to.n, N_TOKENS);
    assert_memory_equal(read, tokens, sizeof(tokens));
    for (int seed = 0; seed < n_seeds; seed++) {
        kvp_plain expected = make(seed);
        const bool same = memcmp(expected.bytes, plain.bytes, N) == 0;
        kvp_plain_free(&expected);
        if (!same)
            continue;
        kvp_plain_free(&plain);
        return seed;
    }
    fail_msg("the file has a state that nobody wrote");
    return -1;
}

static void states_come_back(void **state)
{
    kvp_plain plain = make(0), got;
    size_t n, n_tokens = 0;
    uint8_t *packed = pack(&plain, &n);
    FILE *file;

    (void)state;
    assert_true(kvp_is_packed(packed, n));
    assert_null(kvp_unpack(packed, n, false, &got));
    assert_is(&plain, &got);
    kvp_plain_free(&got);
    assert_non_null(kvp_unpack(packed, n, true, &got)); /* another kind of state */
    assert_true(kvp_pack_save(&plain, tokens, N_TOKENS, path));
    assert_int_equal(seed_of_file(1), 0);
    file = kvp_host_open(path, false);
    assert_null(kvp_pack_count(file, &n_tokens));
    assert_int_equal(n_tokens, N_TOKENS);
    assert_int_equal(kvp_host_file_bytes(file), kvp_pack_bytes(&plain, N_TOKENS));
    fclose(file);
    free(packed);
    kvp_plain_free(&plain);
}

static void every_damage_is_found(void **state)
{
    kvp_plain plain = make(0), got;
    size_t n;
    uint8_t *packed = pack(&plain, &n);

    (void)state;
    for (size_t at = 0; at < n; at++)
        for (int bit = 0; bit < 8; bit++) {
            packed[at] ^= (uint8_t)(1 << bit);
            if (kvp_unpack(packed, n, false, &got) == NULL)
                fail_msg("bit %d of byte %zu may be damaged", bit, at);
            assert_null(got.bytes);
            packed[at] ^= (uint8_t)(1 << bit);
        }
    for (size_t left = 0; left < n; left++)
        assert_non_null(kvp_unpack(packed, left, false, &got));
    free(packed);
    kvp_plain_free(&plain);
}

/* Writes the right checksum. */
static void seal(uint8_t *packed, size_t n)
{
    kvp_pack_header header;

    memcpy(&header, packed, sizeof(header));
    header.check = 0;
    memcpy(packed, &header, sizeof(header));
    header.check = kvant_checksum_of(packed, n);
    memcpy(packed, &header, sizeof(header));
}

/* Heads and runs that cannot be, with the right checksum. */
static void impossible_sizes_are_refused(void **state)
{
    enum { N_CASES = 13 };
    kvp_plain plain = make(0), got;
    size_t n;
    uint8_t *packed = pack(&plain, &n), *copy = malloc(n);

    (void)state;
    assert_non_null(copy);
    memcpy(copy, packed, n);
    seal(copy, n);
    assert_memory_equal(copy, packed, n);
    for (int i = 0; i < N_CASES; i++) {
        kvp_pack_header header;
        kvp_pack_run run;
        memcpy(copy, packed, n);
        memcpy(&header, copy, sizeof(header));
        memcpy(&run, copy + sizeof(header) + sizeof(run), sizeof(run));
        header.bytes += i == 0 ? 1 : i == 1 ? UINT64_MAX / 2 : 0;
        header.nominal += i == 2 ? 1 : i == 3 ? UINT64_MAX / 2 : 0;
        header.n_runs = i == 4 ? UINT32_MAX : i == 5 ? 2 : header.n_runs;
        header.n_tokens = i == 6 ? UINT32_MAX : i == 7 ? 2 : 0;
        run.at = i == 8 ? 99 : i == 9 ? UINT64_MAX - 10 : run.at;
        run.kept = i == 10 ? run.room : i == 11 ? 39 : run.kept;
        run.room = i == 12 ? UINT64_MAX : run.room;
        memcpy(copy + sizeof(header) + sizeof(run), &run, sizeof(run));
        memcpy(copy, &header, sizeof(header));
        seal(copy, n);
        if (kvp_unpack(copy, n, false, &got) == NULL)
            fail_msg("case %d was accepted", i);
    }
    free(copy);
    free(packed);
    kvp_plain_free(&plain);
}

/* A child process writes the state, and is killed by the first byte beyond `limit`. Returns whether
 * it was killed. */
static bool write_until(const kvp_plain *plain, size_t limit)
{
    const struct rlimit most = { limit, limit }, none = { 0, 0 };
    const pid_t child = fork();
    int status = 0;

    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGXFSZ, SIG_DFL);
        setrlimit(RLIMIT_CORE, &none);
        setrlimit(RLIMIT_FSIZE, &most);
        _exit(kvp_pack_save(plain, tokens, N_TOKENS, path) ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ)
        return true;
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return false;
}

/* Whatever a killed process has written, the former state is there, and the next one is written. */
static void killed_writers_harm_nothing(void **state)
{
    kvp_plain former = make(0), plain = make(1);
    const size_t n = kvp_pack_bytes(&plain, N_TOKENS);

    (void)state;
    assert_true(kvp_pack_save(&former, tokens, N_TOKENS, path));
    for (size_t limit = 0; limit < n; limit++) {
        assert_true(write_until(&plain, limit));
        assert_int_equal(seed_of_file(2), 0);
    }
    assert_int_equal(access(part, F_OK), 0); /* of the last one that was killed */
    assert_false(write_until(&plain, n));
    assert_int_equal(seed_of_file(2), 1);
    assert_int_equal(access(part, F_OK), -1);
    kvp_plain_free(&former);
    kvp_plain_free(&plain);
}

/* Two processes do not write one file at the same time. */
static void a_file_has_one_writer(void **state)
{
    kvp_plain plain = make(1);
    char name[80];
    FILE *other;

    (void)state;
    other = kvp_host_create(path, name, sizeof(name));
    assert_non_null(other);
    assert_false(kvp_pack_save(&plain, tokens, N_TOKENS, path));
    assert_true(fputs("other", other) >= 0);
    assert_true(kvp_host_finish(other, path, name, true));
    assert_int_equal(seed_of_file(2), -1);
    assert_true(kvp_pack_save(&plain, tokens, N_TOKENS, path));
    assert_int_equal(seed_of_file(2), 1);
    kvp_plain_free(&plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(states_come_back),
        cmocka_unit_test(every_damage_is_found),
        cmocka_unit_test(impossible_sizes_are_refused),
        cmocka_unit_test(killed_writers_harm_nothing),
        cmocka_unit_test(a_file_has_one_writer),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
