/* cmd_state.c - `kvant state info`: what files of saved states hold, packed ones and others. It
 * finds the rows that are codes by their heads, wherever llama.cpp put them, and checks their
 * checksums. It does not decode rows, which need the model's codecs. */
#include "args.h"
#include "command.h"
#include "os.h"

#include "../integrations/llama.cpp/state_format.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const arg_spec spec = {
    .command = "state",
    .usage = "info FILE...",
    .about =
        "Shows what llama.cpp's files of saved states (slots, sessions) hold: rows that are codes "
        "of\n"
        "kvant, and zeros. Ends with 1 if codes are damaged or a file is not a state.",
    .notes = "A packed state has no zeros; only a llama.cpp with kvant reads it. In other states "
             "zeros\n"
             "take no space after `fallocate --dig-holes FILE`, and llama.cpp reads them as "
             "before.",
};

/* A state begins with one of these numbers, a version and the number of tokens. */
#define STATE_MAGIC 0x67677371u /* "ggsq" (LLAMA_STATE_SEQ_MAGIC) */

#define SESSION_MAGIC 0x6767736eu /* "ggsn" (LLAMA_SESSION_MAGIC): of all sequences */

/* A file system frees zeros in blocks of this size. */
#define DISK_BLOCK 4096u /* of ext4, xfs and btrfs */

typedef struct contents {
    uint64_t n_runs, n_cells, code_bytes, zero_bytes;
    uint64_t n_damaged, first_damaged; /* the place of the first damaged run */
} contents;

/* Whether a head with its lists and its record, which are whole, has the right checksums. */
static bool is_sound(const kvp_state_header *header, const uint8_t *at)
{
    const uint64_t lists = kvp_state_list_bytes(header->n_blocks, header->n_runs);
    uint64_t checksum;
    if (lists + sizeof checksum > header->bytes || header->bytes % sizeof checksum ||
        header->check != kvp_state_check(header, at + sizeof *header))
        return false;
    memcpy(&checksum, at + header->bytes - sizeof checksum, sizeof checksum);
    return checksum ==
           kvant_checksum_of(at + lists, (size_t)(header->bytes - lists - sizeof checksum));
}

/* Counts the run that begins at a place with the right magic. Returns its bytes. */
static size_t count_run(const uint8_t *data, size_t size, size_t at, contents *c)
{
    kvp_state_header header = { .bytes = 0 };
    const bool whole = size - at >= sizeof header;
    if (whole)
        memcpy(&header, data + at, sizeof header);
    if (!whole || header.bytes > size - at || header.bytes < sizeof header ||
        !is_sound(&header, data + at)) {
        c->first_damaged = c->n_damaged++ ? c->first_damaged : at;
        return KVP_STATE_MAGIC_BYTES;
    }
    c->n_runs++;
    c->n_cells += header.n_cells;
    c->code_bytes += header.bytes;
    return (size_t)header.bytes;
}

static void find_runs(const uint8_t *data, size_t size, contents *c)
{
    for (size_t at = 0; at + KVP_STATE_MAGIC_BYTES <= size;) {
        const uint8_t *next = memchr(data + at, (unsigned char)KVP_STATE_MAGIC[0], size - at);
        if (next == NULL)
            return;
        at = (size_t)(next - data);
        if (size - at < KVP_STATE_MAGIC_BYTES ||
            memcmp(next, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES) != 0)
            at++;
        else
            at += count_run(data, size, at, c);
    }
}

static void count_zeros(const uint8_t *data, size_t size, contents *c)
{
    static const uint8_t zeros[DISK_BLOCK];
    for (size_t at = 0; at + DISK_BLOCK <= size; at += DISK_BLOCK)
        if (memcmp(data + at, zeros, DISK_BLOCK) == 0)
            c->zero_bytes += DISK_BLOCK;
}

static double mib(uint64_t bytes)
{
    return (double)bytes / 1048576.0;
}

/* The facts at the begin of a file. */
typedef struct beginning {
    uint32_t n_tokens;
    bool known, packed, sound, all;
    uint64_t nominal;
} beginning;

/* Whether a run of a packed state, which is whole, is sound. */
static bool is_sound_run(const kvp_pack_run *run, const uint8_t *at)
{
    kvp_state_header head;
    if (run->kept < sizeof head)
        return false;
    memcpy(&head, at, sizeof head);
    return head.bytes == run->kept && is_sound(&head, at) &&
           run->check ==
               kvp_pack_run_check(at, (size_t)kvp_state_list_bytes(head.n_blocks, head.n_runs),
                                  (size_t)run->kept);
}

/* Whether the bytes before the runs, and the runs, have the right checksums. */
static bool has_sound_parts(const kvp_pack_header *header, const uint8_t *data, size_t size)
{
    kvp_pack_header plain = *header;
    uint64_t prefix = size, at;
    kvp_pack_run run;
    kvant_checksum sum;
    if (kvp_pack_head_bytes(header->n_runs, header->n_tokens) > size)
        return false;
    for (uint32_t i = 0; i < header->n_runs; i++) {
        memcpy(&run, data + sizeof *header + i * sizeof run, sizeof run);
        if (run.kept > prefix)
            return false;
        prefix -= run.kept;
    }
    if (prefix < kvp_pack_head_bytes(header->n_runs, header->n_tokens))
        return false;
    plain.check = 0;
    kvant_checksum_begin(&sum);
    kvant_checksum_add(&sum, &plain, sizeof plain);
    kvant_checksum_add(&sum, data + sizeof plain, (size_t)prefix - sizeof plain);
    at = prefix;
    for (uint32_t i = 0; i < header->n_runs; i++, at += run.kept) {
        memcpy(&run, data + sizeof *header + i * sizeof run, sizeof run);
        if (!is_sound_run(&run, data + at))
            return false;
    }
    return header->check == kvant_checksum_end(&sum);
}

static beginning read_packed(const uint8_t *data, size_t size)
{
    kvp_pack_header header = { .bytes = 0 };
    beginning b = { .known = true, .packed = true };
    if (size < sizeof header)
        return b;
    memcpy(&header, data, sizeof header);
    b.n_tokens = header.n_tokens;
    b.nominal = header.nominal;
    b.all = header.all != 0;
    b.sound = header.bytes == size && has_sound_parts(&header, data, size);
    return b;
}

static beginning read_beginning(const uint8_t *data, size_t size)
{
    uint32_t head[3];
    if (memcmp(data, KVP_PACK_MAGIC, KVP_STATE_MAGIC_BYTES) == 0)
        return read_packed(data, size);
    memcpy(head, data, sizeof head);
    return (beginning){ .known = head[0] == STATE_MAGIC || head[0] == SESSION_MAGIC,
                        .sound = true,
                        .n_tokens = head[2],
                        .all = head[0] == SESSION_MAGIC,
                        .nominal = size };
}

static int show(const char *path, const uint8_t *data, size_t size)
{
    const beginning b = read_beginning(data, size);
    contents c = { 0 };
    if (!b.known)
        complain("%s: not a state that llama.cpp saved", path);
    else if (!b.sound)
        complain("%s: the packed state is damaged or cut short; llama.cpp with kvant refuses it, "
                 "so delete the file",
                 path);
    if (!b.sound || !b.known)
        return EXIT_RUNTIME;
    find_runs(data, size, &c);
    count_zeros(data, size, &c);
    print_plain(stdout, path);
    printf(": %u tokens%s, %.2f MiB, %.2f MiB on disk\n", b.n_tokens,
           b.all ? ", all sequences" : "", mib(size), os_bytes_on_disk(path) / 1048576);
    if (b.packed)
        printf("  packed %.2f MiB of llama.cpp's\n", mib(b.nominal));
    printf("  codes  %.2f MiB in %llu runs of %llu rows\n", mib(c.code_bytes),
           (unsigned long long)c.n_runs, (unsigned long long)c.n_cells);
    printf("  zeros  %.2f MiB\n", mib(c.zero_bytes));
    if (c.n_damaged == 0)
        return EXIT_OK;
    complain("%s: %llu runs of codes are damaged, the first at byte %llu; llama.cpp computes NaN "
             "from them, so delete the file",
             path, (unsigned long long)c.n_damaged, (unsigned long long)c.first_damaged);
    return EXIT_RUNTIME;
}

static int inspect(const char *path)
{
    int file, code = EXIT_RUNTIME;
    uint64_t size = 0;
    const void *data = NULL;
    if (!kvant_os_open(path, &file)) {
        complain("%s: %s", path, strerror(errno));
        return code;
    }
    if (!kvant_os_size(file, &size) || size < 12)
        complain("%s: not a state that llama.cpp saved", path);
    else if ((data = kvant_os_map_file(file, (size_t)size)) == NULL)
        complain("%s: %s", path, strerror(errno));
    else
        code = show(path, data, (size_t)size);
    if (data != NULL)
        kvant_os_unmap(data, (size_t)size);
    kvant_os_close(file);
    return code;
}

int command_state(int argc, char **argv)
{
    int rest, worst = EXIT_OK;
    const int code = args_parse(&spec, argc, argv, NULL, &rest);
    if (code >= 0)
        return code;
    if (rest + 1 >= argc || strcmp(argv[rest], "info") != 0) {
        complain("state: usage: kvant state info FILE...");
        return EXIT_USAGE;
    }
    for (int i = rest + 1; i < argc; i++)
        if (inspect(argv[i]) != EXIT_OK)
            worst = EXIT_RUNTIME;
    return finish_output() == EXIT_OK ? worst : EXIT_RUNTIME;
}
