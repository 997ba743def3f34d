/* test_pack.c - packed states: every byte damaged, every length cut, every number of bytes after
 * which a process that writes a file is killed, and sizes that cannot be. */
#define _GNU_SOURCE /* mkdtemp, fork, setrlimit */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../cases.h"
#include "../../integrations/llama.cpp/host.h"
#include "../../integrations/llama.cpp/pack.h"

enum { N = 1000, N_TOKENS = 3 };

static const int32_t tokens[N_TOKENS] = { 7, -1, 1 << 20 };
static char folder[] = "/tmp/kvant_pack_XXXXXX";
static char path[64], part[80];

static int start(void **state)
{
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof(path), "%s/state", folder);
    snprintf(part, sizeof(part), "%s.kvant-part", path);
    return 0;
}

static int stop(void **state)
{
    unlink(path);
    unlink(part);
    return rmdir(folder);
}

/* Runs at the begin of a state, in its middle and at its end. */
static const kvp_pack_run runs[] = { { 0, 65, 100, 0 }, { 100, 48, 51, 0 }, { 700, 103, 300, 0 } };
enum { N_RUNS = sizeof(runs) / sizeof(runs[0]) };

/* Writes a head, lists and a record whose bytes depend on a seed. */
static void make_run(uint8_t *to, size_t kept, int seed)
{
    const kvp_state_header header = {
        .magic = KVP_STATE_MAGIC, .bytes = kept, .n_blocks = kept > 64, .n_cells = (uint32_t)seed
    };
    const size_t lists = (size_t)kvp_state_list_bytes(header.n_blocks, 0), end = kept - 8;
    uint64_t checksum;

    for (size_t i = 0; i < kept; i++)
        to[i] = (uint8_t)(1 + (i * 7 + (size_t)seed) % 251);
    memcpy(to, &header, sizeof(header));
    checksum = kvant_checksum_of(to + lists, end - lists);
    memcpy(to + end, &checksum, sizeof(checksum));
}

/* A state as llama.cpp writes it. */
static kvp_plain make_of(const kvp_pack_run *list, size_t n_list, size_t n, int seed)
{
    kvp_plain plain;
    size_t at = 0;

    assert_true(kvp_plain_create(&plain, n));
    for (size_t i = 0; i <= n_list; i++) {
        for (const size_t end = i < n_list ? list[i].at : n; at < end; at++)
            plain.bytes[at] = (uint8_t)(1 + (at * 7 + (size_t)seed) % 251);
        if (i == n_list)
            return plain;
        make_run(plain.bytes + at, list[i].kept, seed);
        assert_true(kvp_plain_add(&plain, at, list[i].kept, list[i].room));
        at += list[i].room;
    }
    return plain;
}

static kvp_plain make(int seed)
{
    return make_of(runs, N_RUNS, N, seed);
}

/* Gives the runs to a packed state. */
static void give_runs(kvp_packing *p)
{
    const kvp_plain *plain = p->plain;

    for (uint32_t i = 0; i < plain->n_runs; i++) {
        const kvp_pack_run *run = &plain->runs[i];
        uint8_t *to = kvp_packing_place(p, run->at, run->kept, run->room);
        assert_non_null(to);
        memcpy(to, plain->bytes + run->at, run->kept);
        kvp_packing_placed(p);
    }
}

static uint8_t *pack(kvp_plain *plain, size_t *n)
{
    uint8_t *packed;
    kvp_packing p;

    *n = kvp_pack_bytes(plain, 0);
    packed = malloc(*n);
    assert_non_null(packed);
    kvp_packing_to_memory(&p, plain, packed);
    give_runs(&p);
    assert_true(kvp_packing_end(&p, true));
    return packed;
}

static bool save(kvp_plain *plain)
{
    kvp_packing p;

    if (!kvp_packing_to_file(&p, plain, tokens, N_TOKENS, path))
        return false;
    give_runs(&p);
    return kvp_packing_end(&p, true);
}

static int open_file(void)
{
    int file;

    return kvant_os_open(path, &file) ? file : -1;
}

/* Unpacks a whole state. NULL, or the reason why it cannot be right. */
static const char *unpack_of(const kvp_pack_source *source, bool all, kvp_plain *plain,
                             kvp_pack_tokens *to)
{
    kvp_unpacking u;
    const char *why = kvp_unpacking_begin(&u, source, all, false, to, NULL, NULL);

    if (why == NULL)
        why = kvp_unpacking_finish(&u);
    *plain = (kvp_plain){ 0 };
    if (why == NULL) {
        *plain = u.plain;
        u.plain = (kvp_plain){ 0 };
    }
    kvp_unpacking_free(&u);
    return why;
}

static const char *unpack(const uint8_t *from, size_t n, bool all, kvp_plain *plain)
{
    return unpack_of(&(kvp_pack_source){ .from = from, .n = n }, all, plain, NULL);
}

static const char *load(int file, kvp_plain *plain, kvp_pack_tokens *to)
{
    return unpack_of(&(kvp_pack_source){ .file = file }, false, plain, to);
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
    const int file = open_file();
    kvp_plain plain;
    const char *why;

    if (file < 0)
        return -1;
    why = load(file, &plain, &to);
    kvant_os_close(file);
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

CASE(states_come_back)
{
    kvp_plain plain = make(0), got;
    size_t n, n_tokens = 0;
    uint8_t *packed = pack(&plain, &n);
    uint64_t bytes;
    int file;

    assert_true(kvp_is_packed(packed, n));
    assert_null(unpack(packed, n, false, &got));
    assert_is(&plain, &got);
    kvp_plain_free(&got);
    assert_non_null(unpack(packed, n, true, &got)); /* another kind of state */
    assert_true(save(&plain));
    assert_int_equal(seed_of_file(1), 0);
    file = open_file();
    assert_null(kvp_pack_count(file, &n_tokens));
    assert_int_equal(n_tokens, N_TOKENS);
    assert_true(kvant_os_size(file, &bytes));
    assert_int_equal(bytes, kvp_pack_bytes(&plain, N_TOKENS));
    kvant_os_close(file);
    free(packed);
    kvp_plain_free(&plain);
}

CASE(every_damage_is_found)
{
    kvp_plain plain = make(0), got;
    size_t n;
    uint8_t *packed = pack(&plain, &n);

    for (size_t at = 0; at < n; at++)
        for (int bit = 0; bit < 8; bit++) {
            packed[at] ^= (uint8_t)(1 << bit);
            if (unpack(packed, n, false, &got) == NULL)
                fail_msg("bit %d of byte %zu may be damaged", bit, at);
            assert_null(got.bytes);
            packed[at] ^= (uint8_t)(1 << bit);
        }
    for (size_t left = 0; left < n; left++)
        assert_non_null(unpack(packed, left, false, &got));
    free(packed);
    kvp_plain_free(&plain);
}

/* Writes the right checksum of the bytes before the runs'. */
static void seal(uint8_t *packed, size_t prefix)
{
    kvp_pack_header header;

    memcpy(&header, packed, sizeof(header));
    header.check = 0;
    memcpy(packed, &header, sizeof(header));
    header.check = kvant_checksum_of(packed, prefix);
    memcpy(packed, &header, sizeof(header));
}

/* Heads and runs that cannot be, with the right checksum. */
CASE(impossible_sizes_are_refused)
{
    enum { N_CASES = 14 };
    kvp_plain plain = make(0), got;
    const size_t prefix = kvp_pack_prefix(&plain, 0);
    size_t n;
    uint8_t *packed = pack(&plain, &n), *copy = malloc(n);

    assert_non_null(copy);
    memcpy(copy, packed, n);
    seal(copy, prefix);
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
        run.kept = i == 10 ? run.room : i == 11 ? 47 : run.kept;
        run.room = i == 12 ? UINT64_MAX : run.room;
        run.check += i == 13;
        memcpy(copy + sizeof(header) + sizeof(run), &run, sizeof(run));
        memcpy(copy, &header, sizeof(header));
        seal(copy, prefix);
        if (unpack(copy, n, false, &got) == NULL)
            fail_msg("case %d was accepted", i);
    }
    free(copy);
    free(packed);
    kvp_plain_free(&plain);
}

/* A child process writes the state, and is killed by the first byte beyond `limit`. Returns whether
 * it was killed. */
static bool write_until(kvp_plain *plain, size_t limit)
{
    const struct rlimit most = { limit, limit }, none = { 0, 0 };
    const pid_t child = fork();
    int status = 0;

    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGXFSZ, SIG_DFL);
        setrlimit(RLIMIT_CORE, &none);
        setrlimit(RLIMIT_FSIZE, &most);
        _exit(save(plain) ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ)
        return true;
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return false;
}

/* Whatever a killed process has written, the former state is there, and the next one is written. */
CASE(killed_writers_harm_nothing)
{
    kvp_plain former = make(0), plain = make(1);
    const size_t n = kvp_pack_bytes(&plain, N_TOKENS);

    assert_true(save(&former));
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
CASE(a_file_has_one_writer)
{
    kvp_plain plain = make(1);
    char name[80];
    int other;

    assert_true(kvp_host_create(path, name, sizeof(name), &other));
    assert_false(save(&plain));
    assert_true(kvant_os_write(other, "other", 5));
    assert_true(kvp_host_finish(other, path, name, true));
    assert_int_equal(seed_of_file(2), -1);
    assert_true(save(&plain));
    assert_int_equal(seed_of_file(2), 1);
    kvp_plain_free(&plain);
}

/* Runs that a thread writes and several threads read. Their zeros take no memory. */
enum { LARGE_RUNS = 5 };

static kvp_plain make_large(int seed)
{
    kvp_pack_run large[LARGE_RUNS];
    const size_t room = (size_t)80 << 20;

    for (size_t i = 0; i < LARGE_RUNS; i++)
        large[i] = (kvp_pack_run){ .at = 16 + i * room, .kept = (1000000 + i) * 8, .room = room };
    return make_of(large, LARGE_RUNS, 24 + LARGE_RUNS * room, seed);
}

static const char *load_file(kvp_plain *plain)
{
    int32_t read[N_TOKENS];
    kvp_pack_tokens to = { read, N_TOKENS, 0 };
    const int file = open_file();
    const char *why = load(file, plain, &to);

    kvant_os_close(file);
    return why;
}

CASE(large_states_come_back)
{
    kvp_plain plain = make_large(0), got;
    uint64_t at = kvp_pack_prefix(&plain, N_TOKENS);

    assert_true(save(&plain));
    assert_null(load_file(&got));
    assert_int_equal(got.n_runs, LARGE_RUNS);
    for (uint32_t i = 0; i < LARGE_RUNS; i++) {
        const kvp_pack_run *run = &plain.runs[i];
        assert_memory_equal(got.bytes + run->at, plain.bytes + run->at, run->kept);
    }
    assert_memory_equal(got.bytes, plain.bytes, 16);
    assert_memory_equal(got.bytes + got.n - 8, plain.bytes + got.n - 8, 8);
    kvp_plain_free(&got);
    for (uint32_t i = 0; i < LARGE_RUNS; at += plain.runs[i++].kept) {
        const uint64_t place = at + plain.runs[i].kept / 2;
        const int file = open(path, O_RDWR);
        uint8_t byte;
        assert_true(kvant_os_read_at(file, &byte, 1, place));
        byte ^= 64;
        assert_true(kvant_os_write_at(file, &byte, 1, place));
        assert_non_null(load_file(&got));
        byte ^= 64;
        assert_true(kvant_os_write_at(file, &byte, 1, place));
        close(file);
    }
    assert_null(load_file(&got));
    kvp_plain_free(&got);
    kvp_plain_free(&plain);
}

static bool write_bytes(const uint8_t *bytes, size_t n)
{
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    const bool done = file >= 0 && kvant_os_write(file, bytes, n);

    close(file);
    return done;
}

/* Receives the runs one by one, whole or in two pieces. Returns how many came. */
static uint32_t receive(kvp_unpacking *u, const kvp_plain *expected, bool whole)
{
    for (uint32_t i = 0; i < LARGE_RUNS; i++) {
        const kvp_pack_run *run = &expected->runs[i];
        const uint8_t *place = u->plain.bytes + run->at,
                      *at = kvp_unpacking_wait(u, place, whole ? (size_t)run->room : 64, true);
        if (at == NULL)
            return i;
        assert_true(whole || at == place);
        assert_true(kvp_unpacking_has(u, at, (size_t)run->kept));
        assert_memory_equal(at, expected->bytes + run->at, run->kept);
        if (!whole)
            assert_ptr_equal(kvp_unpacking_wait(u, place + 64, (size_t)run->room - 64, true),
                             place + 64);
        assert_int_equal(u->n_seen, i + 1);
    }
    return LARGE_RUNS;
}

/* Each run is there and right when it is received, and a damaged one is found then. */
CASE(large_states_come_run_by_run)
{
    kvp_plain plain = make_large(2);
    uint64_t at = kvp_pack_prefix(&plain, 0) + plain.runs[0].kept + plain.runs[1].kept;
    kvp_unpacking u;
    size_t n;
    uint8_t *packed = pack(&plain, &n);

    assert_true(write_bytes(packed, n));
    for (int way = 0; way < 8; way++) { /* from memory or a file, whole or not, damaged or not */
        const bool damages = way & 4;
        int file = open(path, O_RDWR);
        kvp_pack_source source = { .from = way & 1 ? packed : NULL, .n = n, .file = file };
        if (damages) {
            packed[at + 1000] ^= 1;
            assert_true(kvant_os_write_at(file, packed + at + 1000, 1, at + 1000));
        }
        assert_null(kvp_unpacking_begin(&u, &source, false, true, NULL, NULL, NULL));
        assert_true(u.early);
        assert_memory_equal(u.plain.bytes, plain.bytes, 16);
        if (damages) /* a thread may find it sooner */
            assert_true(receive(&u, &plain, way & 2) <= 2);
        else
            assert_int_equal(receive(&u, &plain, way & 2), LARGE_RUNS);
        assert_int_equal(kvp_unpacking_finish(&u) == NULL, !damages);
        assert_false(u.missed);
        kvp_unpacking_free(&u);
        if (damages) {
            packed[at + 1000] ^= 1;
            assert_true(kvant_os_write_at(file, packed + at + 1000, 1, at + 1000));
        }
        kvant_os_close(file);
    }
    free(packed);
    kvp_plain_free(&plain);
}

/* A caller that wants no more runs, and one that has not received all of them. */
CASE(runs_may_stay)
{
    kvp_plain plain = make_large(2);
    size_t n;
    uint8_t *packed = pack(&plain, &n);
    const kvp_pack_source source = { .from = packed, .n = n };
    kvp_unpacking u;

    assert_null(kvp_unpacking_begin(&u, &source, false, true, NULL, NULL, NULL));
    kvp_unpacking_free(&u);
    assert_null(kvp_unpacking_begin(&u, &source, false, true, NULL, NULL, NULL));
    assert_non_null(kvp_unpacking_wait(&u, u.plain.bytes + plain.runs[1].at, 8, true));
    assert_true(u.missed);
    assert_null(kvp_unpacking_finish(&u));
    kvp_unpacking_free(&u);
    free(packed);
    kvp_plain_free(&plain);
}

/* The disk is full, or a process is killed, while a thread writes. */
CASE(threads_that_cannot_write_harm_nothing)
{
    kvp_plain plain = make_large(1), got;
    const size_t n = kvp_pack_bytes(&plain, N_TOKENS);
    struct rlimit former, most;

    assert_true(save(&plain));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &former), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (size_t eighth = 1; eighth < 8; eighth++) {
        most = (struct rlimit){ n * eighth / 8, former.rlim_max };
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &most), 0);
        assert_false(save(&plain));
        assert_int_equal(errno, EFBIG);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &former), 0);
        assert_int_equal(access(part, F_OK), -1);
        assert_null(load_file(&got));
        kvp_plain_free(&got);
    }
    signal(SIGXFSZ, SIG_DFL);
    kvp_plain_free(&plain);
}

/* A run that was not found before, runs that are missing, and a caller that cannot make them. */
CASE(states_that_change_are_not_saved)
{
    kvp_plain plain = make(0);
    kvp_packing p;

    assert_true(save(&plain));
    for (int i = 0; i < 3; i++) {
        assert_true(kvp_packing_to_file(&p, &plain, tokens, N_TOKENS, path));
        if (i > 0)
            give_runs(&p);
        if (i == 1)
            assert_null(kvp_packing_place(&p, runs[0].at, runs[0].kept, runs[0].room));
        assert_false(kvp_packing_end(&p, i < 2));
        assert_int_equal(errno, 0);
        assert_int_equal(seed_of_file(1), 0);
    }
    assert_true(kvp_packing_to_file(&p, &plain, tokens, N_TOKENS, path));
    assert_null(kvp_packing_place(&p, runs[0].at, runs[0].kept + 8, runs[0].room));
    assert_false(kvp_packing_end(&p, true));
    kvp_plain_free(&plain);
}

RUN_CASES(start, stop)
