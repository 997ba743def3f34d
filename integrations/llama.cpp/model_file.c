/* model_file.c - see model_file.h. */
#include "model_file.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "gguf.h"
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

/* Metadata */

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

static void note_key(const char *key, const gguf_value *value, struct layers *layers)
{
    if (ends_with(key, ".block_count"))
        layers->all = value->number;
    if (ends_with(key, ".nextn_predict_layers"))
        layers->drafting = value->number;
    if (ends_with(key, ".attention.shared_kv_layers"))
        layers->sharing = value->number;
    if (ends_with(key, ".decoder_block_count") || strstr(key, ".ssm.") != NULL ||
        strstr(key, ".shortconv.") != NULL || strstr(key, ".wkv.") != NULL ||
        (value->type == GGUF_ARRAY && ends_with(key, ".attention.head_count_kv")))
        layers->mixed = true;
}

/* Reads up to the tokenizer's words, which mostly come after the keys that describe the model. */
static bool read_keys(gguf_reader *r, struct layers *layers)
{
    char key[GGUF_TEXT];
    gguf_value value;

    while (r->n_keys > 0) {
        if (!gguf_take_name(r, key))
            return false;
        if (layers->all > 0 && strncmp(key, "tokenizer.", 10) == 0)
            return true;
        if (!gguf_take_value(r, &value))
            return false;
        note_key(key, &value, layers);
    }
    return true;
}

static uint32_t less(uint32_t a, uint32_t b)
{
    return a > b ? a - b : 0;
}

kvp_model_layers kvp_count_model_layers(const char *path)
{
    FILE *file = kvp_host_open(path, false);
    struct layers layers = { 0 };
    gguf_reader r;
    bool ok;

    if (file == NULL)
        return (kvp_model_layers){ 0 };
    ok = gguf_begin(&r, file, kvp_host_file_bytes(file)) && read_keys(&r, &layers);
    fclose(file);
    if (!ok)
        return (kvp_model_layers){ 0 };
    layers.all = less(layers.all, layers.drafting);
    return (kvp_model_layers){ layers.all, layers.mixed ? 0 : less(layers.all, layers.sharing) };
}
