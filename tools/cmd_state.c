/* cmd_state.c - `kvant state info`: what files of saved states hold. It finds the rows that are
 * codes by their heads, wherever llama.cpp put them, and checks their checksums. It does not
 * decode rows, which need the model's codecs. */
#define _POSIX_C_SOURCE 200809L
#include "args.h"
#include "command.h"

#include "../integrations/llama.cpp/state_format.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const arg_spec spec = {
    .command = "state",
    .usage = "info FILE...",
    .about =
        "Shows what llama.cpp's files of saved states (slots, sessions) hold: rows that are codes "
        "of\n"
        "kvant, saved with KVANT_STATES=codes, and zeros. Ends with 1 if codes are damaged or a "
        "file\n"
        "is not a state.",
    .notes = "Zeros take no space after `fallocate --dig-holes FILE`; llama.cpp reads the file as "
             "before.",
};

/* A state of one sequence begins with this number, a version and the number of tokens. */
#define STATE_MAGIC 0x67677371u /* "ggsq" (LLAMA_STATE_SEQ_MAGIC) */

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
    return checksum == kvant_fnv1a_words(KVANT_FNV_START, at + lists,
                                         (size_t)(header->bytes - lists - sizeof checksum));
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

static int show(const char *path, const struct stat *info, const uint8_t *data)
{
    const size_t size = (size_t)info->st_size;
    uint32_t head[3];
    contents c = { 0 };
    memcpy(head, data, sizeof head);
    if (head[0] != STATE_MAGIC)
        complain("%s: not a state of a sequence that llama.cpp saved", path);
    if (head[0] != STATE_MAGIC)
        return EXIT_RUNTIME;
    find_runs(data, size, &c);
    count_zeros(data, size, &c);
    printf("%s: %u tokens, %.2f MiB, %.2f MiB on disk\n", path, head[2], mib(size),
           mib((uint64_t)info->st_blocks * 512));
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
    const int file = open(path, O_RDONLY);
    struct stat info;
    int code = EXIT_RUNTIME;
    if (file < 0 || fstat(file, &info) != 0) {
        complain("%s: %s", path, strerror(errno));
    } else if (!S_ISREG(info.st_mode) || info.st_size < 12) {
        complain("%s: not a state of a sequence that llama.cpp saved", path);
    } else {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (data == MAP_FAILED)
            complain("%s: %s", path, strerror(errno));
        else
            code = show(path, &info, data);
        if (data != MAP_FAILED)
            munmap(data, (size_t)info.st_size);
    }
    if (file >= 0)
        close(file);
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
