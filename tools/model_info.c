/* model_info.c - what engine.h tells about a model and its texts: head dimensions, bits, tokens. */
#define _POSIX_C_SOURCE 200809L
#include "command.h"
#include "engine.h"
#include "text.h"

#include <kvant/codec.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* "<architecture>.attention.<what>" of the model's file, 0 when it is not there or no number of layers or channels. */
static uint32_t meta_number(const struct llama_model *model, const char *what)
{
    char architecture[64], key[128], value[32];
    if (ll.llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture) <= 0)
        return 0;
    snprintf(key, sizeof key, "%s.attention.%s", architecture, what);
    if (ll.llama_model_meta_val_str(model, key, value, sizeof value) <= 0)
        return 0;
    const unsigned long n = strtoul(value, NULL, 10);
    return n <= 65536 ? (uint32_t)n : 0;
}

/* What the file says, or n_embd / n_head as llama.cpp defaults to. */
static uint32_t head_dim(const struct llama_model *model, const char *what)
{
    const uint32_t stated = meta_number(model, what);
    const int32_t n_head = ll.llama_model_n_head(model);
    return stated > 0 ? stated : n_head > 0 ? (uint32_t)(ll.llama_model_n_embd(model) / n_head) : 0;
}

/* Bits of codecs that were asked for before: layers share a few of them. */
typedef struct known_bits {
    const char *spec[16];
    uint32_t dim[16];
    kvant_role role[16];
    double bits[16];
    size_t n;
} known_bits;

static bool known_true_bits(known_bits *known, const kvant_settings_layer *made, kvant_role role, uint32_t layer,
                            const kvant_calibration *calibration, double *bits)
{
    for (size_t i = 0; i < known->n; i++)
        if (known->dim[i] == made->head_dim && known->role[i] == role && strcmp(known->spec[i], made->spec) == 0) {
            *bits = known->bits[i];
            return true;
        }
    const bool ok = codec_true_bits(made, role, layer, calibration, bits);
    if (ok && known->n < sizeof known->bits / sizeof *known->bits) {
        known->spec[known->n] = made->spec;
        known->dim[known->n] = made->head_dim;
        known->role[known->n] = role;
        known->bits[known->n++] = *bits;
    }
    return ok;
}

/* llama.cpp stores the rows of all kv heads of a token side by side, so no block is ever split. */
static double stock_bits(enum ggml_type type)
{
    const int64_t block = ll.ggml_blck_size(type);
    return 8.0 * (double)ll.ggml_row_size(type, block) / (double)block;
}

/* A layer's rows. llama.cpp tells neither kv heads nor head_dim of single layers; where no settings file does, all are taken to
 * be alike, and heads do not matter. */
static kvant_settings_layer shape_of(const kv_config *config, uint32_t layer, kvant_role role,
                                     const uint32_t dims[2])
{
    kvant_settings_layer shape = { .n_kv_heads = 1, .head_dim = dims[role] };
    if (config->path != NULL)
        kvant_settings_get_layer(config->file.settings, layer, role, &shape);
    return shape;
}

/* Layers that keep keys and values of their own: the last ones may use those of others. */
static uint32_t cache_layers(const struct llama_model *model)
{
    const uint32_t n = (uint32_t)ll.llama_model_n_layer(model), shared = meta_number(model, "shared_kv_layers");
    return shared < n ? n - shared : n;
}

static bool has_layer_of(const kvant_settings *settings, uint32_t n_layers, kvant_role role, uint32_t head_dim)
{
    kvant_settings_layer layer = { .head_dim = 0 };
    for (uint32_t i = 0; i < n_layers && layer.head_dim != head_dim; i++)
        kvant_settings_get_layer(settings, i, role, &layer);
    return layer.head_dim == head_dim;
}

/* Heads and head_dim are those of the model's file; the plug-in checks every layer of the cache. */
bool engine_fits(engine *e, const kv_config *config)
{
    const struct llama_model *model = engine_model(e, config);
    kvant_settings_info info = { .size = sizeof info };
    kvant_settings_layer k;
    if (model == NULL || config->path == NULL)
        return model != NULL;
    const uint32_t n_layers = cache_layers(model), heads = (uint32_t)ll.llama_model_n_head_kv(model);
    const uint32_t dim_k = head_dim(model, "key_length"), dim_v = head_dim(model, "value_length");
    const kvant_settings *settings = config->file.settings;
    kvant_settings_get_info(settings, &info);
    kvant_settings_get_layer(settings, 0, KVANT_ROLE_K, &k);
    if (info.n_layers == n_layers && k.n_kv_heads == heads &&
        has_layer_of(settings, n_layers, KVANT_ROLE_K, dim_k) &&
        has_layer_of(settings, n_layers, KVANT_ROLE_V, dim_v))
        return true;
    complain("--config %s is for another model", config->path);
    hint("it is for %s: %lu layers, %lu kv heads of %lu; this one has %lu, %lu of %lu",
         info.model[0] != 0 ? info.model : "one with no name", (unsigned long)info.n_layers,
         (unsigned long)k.n_kv_heads, (unsigned long)k.head_dim, (unsigned long)n_layers, (unsigned long)heads,
         (unsigned long)dim_k);
    return false;
}

bool engine_bits(engine *e, const kv_config *config, double *bits)
{
    const struct llama_model *model = engine_model(e, config);
    if (model == NULL || !engine_fits(e, config))
        return false;
    const uint32_t dims[2] = { head_dim(model, "key_length"), head_dim(model, "value_length") };
    if (config->stock) {
        *bits = (stock_bits(config->type_k) * dims[0] + stock_bits(config->type_v) * dims[1]) / (dims[0] + dims[1]);
        return true;
    }
    const kvant_calibration *calibration = configs_calibration(&e->options.configs, config);
    const uint32_t n_layers = cache_layers(model);
    known_bits known = { .n = 0 };
    double sum = 0, numbers = 0;
    for (uint32_t i = 0; i < 2 * n_layers; i++) {
        const kvant_role role = i % 2 == 0 ? KVANT_ROLE_K : KVANT_ROLE_V;
        kvant_settings_layer made = shape_of(config, i / 2, role, dims);
        const double n = (double)made.n_kv_heads * made.head_dim;
        const uint32_t n_specs = made.heads != NULL ? made.n_kv_heads : 1;
        for (uint32_t head = 0; head < n_specs; head++) {
            double head_bits;
            made.spec = made.heads != NULL ? made.heads[head] : configs_spec(config, i / 2, n_layers, role);
            if (!known_true_bits(&known, &made, role, i / 2, calibration, &head_bits))
                return false;
            sum += head_bits * n / n_specs;
        }
        numbers += n;
    }
    *bits = sum / numbers;
    return true;
}

llama_token *engine_tokenize(const engine *e, const char *text, size_t bytes, token_kind kind, size_t *n)
{
    const struct llama_model *model = e->cpu_model != NULL ? e->cpu_model : e->kvant_model;
    if (bytes > INT32_MAX) {
        complain("the text is longer than 2 GiB");
        return NULL;
    }
    if (!text_check("the prompt", text, bytes)) /* of files it is known; a model's chat template comes from anywhere */
        return NULL;
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
