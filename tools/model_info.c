/* model_info.c - what engine.h tells about a model and its texts: head dimensions, bits, tokens. */
#define _POSIX_C_SOURCE 200809L
#include "command.h"
#include "engine.h"

#include <errno.h>
#include <kvant/codec.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "<architecture>.attention.<what>", or n_embd / n_head as llama.cpp defaults to. */
static uint32_t head_dim(const struct llama_model *model, const char *what)
{
    char architecture[64], key[128], value[32];
    if (ll.llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture) > 0) {
        snprintf(key, sizeof key, "%s.attention.%s", architecture, what);
        if (ll.llama_model_meta_val_str(model, key, value, sizeof value) > 0) {
            const unsigned long n = strtoul(value, NULL, 10);
            if (n > 0 && n <= 65536)
                return (uint32_t)n;
        }
    }
    const int32_t n_head = ll.llama_model_n_head(model);
    return n_head > 0 ? (uint32_t)(ll.llama_model_n_embd(model) / n_head) : 0;
}

static bool codec_bits(const char *spec, uint32_t dim, kvant_role role, const kvant_calibration *calibration,
                       double *bits)
{
    char err[512] = "";
    kvant_codec *codec = NULL;
    kvant_codec_info info = { .size = sizeof info };
    kvant_status status =
        kvant_codec_create_calibrated(spec, dim, role, 0, calibration, 0, 0, &codec, err, sizeof err);
    if (status == KVANT_OK)
        status = kvant_codec_get_info(codec, &info);
    kvant_codec_free(&codec);
    if (status != KVANT_OK)
        complain("%s at head_dim %lu: %s", spec, (unsigned long)dim, err[0] ? err : kvant_strerror(status));
    *bits = info.true_bits;
    return status == KVANT_OK;
}

/* llama.cpp stores the rows of all kv heads of a token side by side, so no block is ever split. */
static double stock_bits(enum ggml_type type)
{
    const int64_t block = ll.ggml_blck_size(type);
    return 8.0 * (double)ll.ggml_row_size(type, block) / (double)block;
}

/* Keys and values averaged by their head dimensions. */
static bool average_bits(const engine *e, const struct llama_model *model, const char *k_spec, const char *v_spec,
                         double *bits)
{
    const kvant_calibration *calibration = e->options.configs.loaded;
    const uint32_t dim_k = head_dim(model, "key_length"), dim_v = head_dim(model, "value_length");
    double k, v;
    if (!codec_bits(k_spec, dim_k, KVANT_ROLE_K, calibration, &k) ||
        !codec_bits(v_spec, dim_v, KVANT_ROLE_V, calibration, &v))
        return false;
    *bits = (k * dim_k + v * dim_v) / (double)(dim_k + dim_v);
    return true;
}

bool engine_bits(engine *e, const kv_config *config, double *bits)
{
    const struct llama_model *model = engine_model(e, config);
    if (model == NULL)
        return false;
    if (config->stock) {
        const uint32_t dim_k = head_dim(model, "key_length"), dim_v = head_dim(model, "value_length");
        *bits = (stock_bits(config->type_k) * dim_k + stock_bits(config->type_v) * dim_v) / (double)(dim_k + dim_v);
        return true;
    }
    const double n_layers = ll.llama_model_n_layer(model);
    const double n_protected = 2.0 * config->protect < n_layers ? 2.0 * config->protect : n_layers;
    const char *other = config->protect_codec != NULL ? config->protect_codec : PLUGIN_PROTECT_CODEC;
    double usual, protected_bits = 0;
    if (!average_bits(e, model, config->k, config->v, &usual) ||
        (config->protect > 0 && !average_bits(e, model, other, other, &protected_bits)))
        return false;
    *bits = (n_protected * protected_bits + (n_layers - n_protected) * usual) / n_layers;
    return true;
}

llama_token *engine_tokenize(const engine *e, const char *text, size_t bytes, token_kind kind, size_t *n)
{
    const struct llama_model *model = e->cpu_model != NULL ? e->cpu_model : e->kvant_model;
    if (bytes > INT32_MAX) {
        complain("the text is longer than 2 GiB");
        return NULL;
    }
    const struct llama_vocab *vocab = ll.llama_model_get_vocab(model);
    const bool begins = kind != TOKENS_PART, special = kind == TOKENS_CHAT;
    const int32_t needed = -ll.llama_tokenize(vocab, text, (int32_t)bytes, NULL, 0, begins, special);
    llama_token *tokens = needed > 0 ? malloc((size_t)needed * sizeof *tokens) : NULL;
    if (tokens == NULL) {
        complain(needed > 0 ? "out of memory" : "the text has no tokens");
        return NULL;
    }
    *n = (size_t)ll.llama_tokenize(vocab, text, (int32_t)bytes, tokens, needed, begins, special);
    return tokens;
}

static char *read_stream(FILE *file, size_t *bytes)
{
    size_t capacity = 1 << 16, n = 0;
    char *text = malloc(capacity);
    while (text != NULL) {
        n += fread(text + n, 1, capacity - n - 1, file);
        if (n < capacity - 1)
            break;
        char *larger = capacity <= SIZE_MAX / 2 ? realloc(text, capacity *= 2) : NULL;
        if (larger == NULL)
            free(text);
        text = larger;
    }
    if (text != NULL)
        text[n] = 0;
    *bytes = n;
    return text;
}

char *read_text(const char *path, size_t *bytes)
{
    const bool standard_input = strcmp(path, "-") == 0;
    errno = 0;
    FILE *file = standard_input ? stdin : fopen(path, "rb");
    if (file == NULL) {
        complain("%s: %s", path, strerror(errno));
        return NULL;
    }
    char *text = read_stream(file, bytes);
    if (text == NULL) {
        complain("%s: out of memory", path);
    } else if (ferror(file)) {
        complain("%s: %s", path, strerror(errno));
        free(text);
        text = NULL;
    }
    if (!standard_input)
        fclose(file);
    return text;
}
