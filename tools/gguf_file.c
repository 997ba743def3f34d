/* gguf_file.c - see gguf_file.h. Reads versions 2 and 3 of the format on little-endian machines. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "gguf_file.h"

#include "os.h"

#include <stdio.h>
#include <string.h>

enum { TYPE_U32 = 4, TYPE_STRING = 8, TYPE_ARRAY = 9, N_TYPES = 13 };
static const uint8_t type_bytes[N_TYPES] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

enum { MAX_KEY = 128 };

typedef struct reader {
    FILE *file;
    uint64_t left; /* bytes behind the position */
} reader;

static bool take(reader *r, void *out, uint64_t n)
{
    if (n > r->left || fread(out, 1, (size_t)n, r->file) != n)
        return false;
    r->left -= n;
    return true;
}

static bool skip(reader *r, uint64_t n)
{
    char small[256];
    if (n <= sizeof small) /* a vocabulary's words: seeking would read the file's block again */
        return take(r, small, n);
    if (n > r->left || fseeko(r->file, (off_t)n, SEEK_CUR) != 0)
        return false;
    r->left -= n;
    return true;
}

/* A string; one that is longer than text has room for becomes "". */
static bool take_string(reader *r, char text[MAX_KEY])
{
    uint64_t n;
    text[0] = 0;
    if (!take(r, &n, sizeof n))
        return false;
    if (n >= MAX_KEY)
        return skip(r, n);
    text[n] = 0;
    return take(r, text, n);
}

static bool skip_array(reader *r)
{
    uint32_t type;
    uint64_t n, bytes;
    if (!take(r, &type, sizeof type) || !take(r, &n, sizeof n) || type >= N_TYPES)
        return false;
    if (type_bytes[type] != 0)
        return n <= r->left / type_bytes[type] && skip(r, n * type_bytes[type]);
    if (type != TYPE_STRING) /* arrays of arrays: the format allows them, no model has them */
        return false;
    for (; n > 0; n--)
        if (!take(r, &bytes, sizeof bytes) || !skip(r, bytes))
            return false;
    return true;
}

/* The value of a key: of a string in text, of a 32-bit number in *number. False when it cannot be
 * read. */
static bool take_value(reader *r, uint32_t type, char text[MAX_KEY], uint32_t *number)
{
    text[0] = 0;
    *number = 0;
    if (type == TYPE_STRING)
        return take_string(r, text);
    if (type == TYPE_U32)
        return take(r, number, sizeof *number);
    if (type == TYPE_ARRAY)
        return skip_array(r);
    return type < N_TYPES && skip(r, type_bytes[type]);
}

/* Looks for a key from the file's beginning on. */
static bool find(FILE *file, uint64_t bytes, const char *key, char text[MAX_KEY], uint32_t *number)
{
    char magic[4], name[MAX_KEY];
    uint32_t version, type;
    uint64_t n_tensors, n;
    reader r = { file, bytes };
    rewind(file);
    if (!take(&r, magic, sizeof magic) || memcmp(magic, "GGUF", 4) != 0 ||
        !take(&r, &version, sizeof version) || version < 2 || version > 3 ||
        !take(&r, &n_tensors, sizeof n_tensors) || !take(&r, &n, sizeof n))
        return false;
    for (; n > 0; n--) {
        if (!take_string(&r, name) || !take(&r, &type, sizeof type) ||
            !take_value(&r, type, text, number))
            return false;
        if (strcmp(name, key) == 0)
            return true;
    }
    return false;
}

static uint64_t file_bytes(const char *path)
{
    uint64_t bytes = 0;
    int file;
    if (!kvant_os_open(path, &file))
        return 0;
    const bool known = kvant_os_size(file, &bytes);
    kvant_os_close(file);
    return known ? bytes : 0;
}

uint64_t gguf_bytes(const char *path)
{
    static const char ending[] = "-00001-of-00000.gguf";
    const size_t length = strlen(path), n = sizeof ending - 1;
    unsigned parts = 0;
    char part[OS_MAX_PATH];
    if (length < n || strncmp(path + length - n, ending, 10) != 0 ||
        sscanf(path + length - n + 10, "%5u.gguf", &parts) != 1)
        return file_bytes(path);
    uint64_t bytes = 0;
    for (unsigned i = 1; i <= parts; i++) {
        const int stem = (int)(length - n);
        if (snprintf(part, sizeof part, "%.*s-%05u-of-%05u.gguf", stem, path, i, parts) <
            (int)sizeof part)
            bytes += file_bytes(part);
    }
    return bytes;
}

bool gguf_read_size(const char *path, gguf_size *size)
{
    char architecture[MAX_KEY], key[MAX_KEY + 16], text[MAX_KEY];
    uint32_t number = 0;
    const uint64_t bytes = file_bytes(path);
    FILE *file = bytes > 0 ? fopen(path, "rb") : NULL;
    if (file == NULL)
        return false;
    bool ok = find(file, bytes, "general.architecture", architecture, &number);
    if (ok) {
        snprintf(key, sizeof key, "%s.block_count", architecture);
        ok = find(file, bytes, key, text, &number) && number > 0 && number <= GGUF_MAX_LAYERS;
    }
    fclose(file);
    *size = (gguf_size){ .n_layers = number, .bytes = ok ? gguf_bytes(path) : 0 };
    return ok;
}
