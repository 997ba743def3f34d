/* model_file.c - see model_file.h. */
#define _POSIX_C_SOURCE 200809L /* fseeko */

#include "model_file.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

static bool is_model(const char *path)
{
    char magic[4] = "";
    /* only regular files, because opening a device may have an effect */
    FILE *file = kvp_host_is_file(path) ? kvp_host_open(path, false) : NULL;

    if (file == NULL)
        return false;
    bool ok = fread(magic, 1, sizeof(magic), file) == sizeof(magic) &&
              memcmp(magic, "GGUF", sizeof(magic)) == 0;
    fclose(file);
    return ok;
}

/* The first part stands for all parts of a model such as model-00002-of-00003.gguf. */
static void name_first_part(char *path)
{
    static const char pattern[] = "-00000-of-00000.gguf";
    const size_t n = sizeof(pattern) - 1, length = strlen(path);
    char *end = path + length - n;

    if (length < n)
        return;
    for (size_t i = 0; i < n; i++)
        if (pattern[i] == '0' ? end[i] < '0' || end[i] > '9' : end[i] != pattern[i])
            return;
    memcpy(end + 1, "00001", 5);
}

/* The model file that was found, and how often the files differed. */
struct search {
    char *model;
    char last[KVP_MODEL_PATH]; /* the file before, because a file is mapped in several pieces */
    size_t n;
};

static void see_file(void *context, const char *mapped)
{
    struct search *search = context;
    char path[KVP_MODEL_PATH];

    if (strlen(mapped) >= sizeof(path) || strcmp(mapped, search->last) == 0)
        return;
    strcpy(search->last, mapped);
    if (!is_model(mapped))
        return;
    strcpy(path, mapped);
    name_first_part(path);
    search->n += search->n == 0 || strcmp(path, search->model) != 0;
    strcpy(search->model, path);
}

bool kvp_find_model(char *model)
{
    struct search search = { .model = model };

    kvp_host_mapped_files(see_file, &search);
    return search.n == 1;
}

/* Metadata. No length is trusted: a string or an array that is longer than the rest of the file
 * ends the reading. */

#define MOST_KEYS 65536u /* a file with more is damaged: models have some dozens */
#define MOST_KEY 256u    /* bytes of a key's name; a longer one ends the reading */

enum { GGUF_UINT32 = 4, GGUF_INT32 = 5, GGUF_STRING = 8, GGUF_ARRAY = 9 };

/* Bytes of a number of this type; 0: the type is no number. */
static size_t bytes_of(uint32_t type)
{
    static const uint8_t bytes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

    return type < sizeof(bytes) ? bytes[type] : 0;
}

typedef struct reader {
    FILE *file;
    uint64_t left; /* bytes of the file */
} reader;

static bool take(reader *r, void *to, size_t bytes)
{
    if (bytes > r->left || fread(to, 1, bytes, r->file) != bytes)
        return false;
    r->left -= bytes;
    return true;
}

static bool skip(reader *r, uint64_t n, size_t each)
{
    const uint64_t bytes = each > 0 && n > r->left / each ? UINT64_MAX : n * each;

    if (bytes > r->left || fseeko(r->file, (off_t)bytes, SEEK_CUR) != 0)
        return false;
    r->left -= bytes;
    return true;
}

static bool skip_strings(reader *r, uint64_t n)
{
    uint64_t length;

    for (; n > 0; n--)
        if (!take(r, &length, sizeof(length)) || !skip(r, length, 1))
            return false;
    return true;
}

/* Skips a key's value; *number becomes the value if it is a 32-bit number. */
static bool take_value(reader *r, uint32_t type, uint32_t *number)
{
    uint64_t n;

    if (type == GGUF_UINT32 || type == GGUF_INT32)
        return take(r, number, sizeof(*number));
    if (type == GGUF_STRING)
        return skip_strings(r, 1);
    if (type != GGUF_ARRAY)
        return bytes_of(type) > 0 && skip(r, 1, bytes_of(type));
    if (!take(r, &type, sizeof(type)) || !take(r, &n, sizeof(n)))
        return false;
    return type == GGUF_STRING ? skip_strings(r, n)
                               : bytes_of(type) > 0 && skip(r, n, bytes_of(type));
}

static bool ends_with(const char *key, const char *end)
{
    const size_t n = strlen(key), m = strlen(end);

    return n >= m && strcmp(key + n - m, end) == 0;
}

/* Layers as the metadata describes them: all layers, layers that only draft tokens, layers that
 * read another layer's keys, and whether layers differ in kind. */
struct layers {
    uint32_t all, drafting, sharing;
    bool mixed;
};

static void note_key(const char *key, uint32_t type, uint32_t number, struct layers *layers)
{
    if (ends_with(key, ".block_count"))
        layers->all = number;
    if (ends_with(key, ".nextn_predict_layers"))
        layers->drafting = number;
    if (ends_with(key, ".attention.shared_kv_layers"))
        layers->sharing = number;
    if (ends_with(key, ".decoder_block_count") || strstr(key, ".ssm.") != NULL ||
        strstr(key, ".shortconv.") != NULL || strstr(key, ".wkv.") != NULL ||
        (type == GGUF_ARRAY && ends_with(key, ".attention.head_count_kv")))
        layers->mixed = true;
}

/* Reads up to the tokenizer's words, which mostly come after the keys that describe the model. */
static bool read_keys(reader *r, uint64_t n, struct layers *layers)
{
    char key[MOST_KEY];

    for (; n > 0; n--) {
        uint32_t type, number = 0;
        uint64_t length;
        if (!take(r, &length, sizeof(length)) || length >= sizeof(key) ||
            !take(r, key, (size_t)length))
            return false;
        key[length] = '\0';
        if (layers->all > 0 && strncmp(key, "tokenizer.", 10) == 0)
            return true;
        if (!take(r, &type, sizeof(type)) || !take_value(r, type, &number))
            return false;
        note_key(key, type, number, layers);
    }
    return true;
}

static uint32_t less(uint32_t a, uint32_t b)
{
    return a > b ? a - b : 0;
}

kvp_model_layers kvp_count_model_layers(const char *path)
{
    struct { /* for files of version 2 or 3 */
        char magic[4];
        uint32_t version;
        uint64_t n_tensors, n_keys;
    } head;
    struct layers layers = { 0 };
    reader r = { kvp_host_open(path, false), 0 };
    bool ok;

    if (r.file == NULL)
        return (kvp_model_layers){ 0 };
    r.left = kvp_host_file_bytes(r.file);
    ok = take(&r, &head, sizeof(head)) && memcmp(head.magic, "GGUF", sizeof(head.magic)) == 0 &&
         (head.version == 2 || head.version == 3) && head.n_keys <= MOST_KEYS &&
         read_keys(&r, head.n_keys, &layers);
    fclose(r.file);
    if (!ok)
        return (kvp_model_layers){ 0 };
    layers.all = less(layers.all, layers.drafting);
    return (kvp_model_layers){ layers.all, layers.mixed ? 0 : less(layers.all, layers.sharing) };
}
