/* model_info.c - what engine.h tells about a model and its texts: head dimensions, bits, tokens. */
#define _POSIX_C_SOURCE 200809L
#include "command.h"
#include "engine.h"
#include "text.h"

#include "../integrations/llama.cpp/mla.h"

#include <kvant/codec.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The value of "<architecture>.attention.<what>" in the model's file. 0 when it is not there or
 * cannot be a number of layers or channels. */
static uint32_t meta_number(const struct llama_model *model, const char *what)
{
    char architecture[64], key[128], value[32];
    if (ll.llama_model_meta_val_str(model, "general.architecture", architecture,
                                    sizeof architecture) <= 0)
        return 0;
    snprintf(key, sizeof key, "%s.attention.%s", architecture, what);
    if (ll.llama_model_meta_val_str(model, key, value, sizeof value) <= 0)
        return 0;
    const unsigned long n = strtoul(value, NULL, 10);
    return n <= 65536 ? (uint32_t)n : 0;
}

/* The value that the file states, or n_embd / n_head, which is llama.cpp's default. */
static uint32_t head_dim(const struct llama_model *model, const char *what)
{
    const uint32_t stated = meta_number(model, what);
    const int32_t n_head = ll.llama_model_n_head(model);
    return stated > 0 ? stated : n_head > 0 ? (uint32_t)(ll.llama_model_n_embd(model) / n_head) : 0;
}

/* llama.cpp stores the rows of all kv heads of a token side by side, so no block is ever split. */
static double stock_bits(enum ggml_type type)
{
    const int64_t block = ll.ggml_blck_size(type);
    return 8.0 * (double)ll.ggml_row_size(type, block) / (double)block;
}

/* The number of layers that have keys and values. The last layers of a model may use keys and
 * values of earlier layers. */
static uint32_t cache_layers(const struct llama_model *model)
{
    const uint32_t n = (uint32_t)ll.llama_model_n_layer(model),
                   shared = meta_number(model, "shared_kv_layers");
    return shared < n ? n - shared : n;
}

/* llama.cpp tells the number of kv heads in the first layer, which has none in some hybrid models.
 * Bits per number do not depend on the number of kv heads, so 1 does then. */
static uint32_t kv_heads(const struct llama_model *model)
{
    const int32_t n = ll.llama_model_n_head_kv(model);
    return n > 0 ? (uint32_t)n : 1;
}

static kvant_scheme_model shape_of(const struct llama_model *model)
{
    return (kvant_scheme_model){ .size = sizeof(kvant_scheme_model),
                                 .n_layers = cache_layers(model),
                                 .n_kv_heads = kv_heads(model),
                                 .head_dim = { head_dim(model, "key_length"),
                                               head_dim(model, "value_length") } };
}

/* Whether the cache has rows of latents: then keys are values, too. */
static bool has_latents(const struct llama_model *model)
{
    return meta_number(model, "key_length_mla") > 0 &&
           kvp_mla_has_row(head_dim(model, "key_length"));
}

/* Writes the bits of a part of such a row with this spec. */
static bool part_bits(const kv_config *config, const char *spec, uint32_t n_layers, double *bits)
{
    const kvant_scheme_params params = { .size = sizeof params,
                                         .k = spec,
                                         .v = spec,
                                         .protect = config->protect,
                                         .protect_codec = config->protect_codec };
    const kvant_scheme_model shape = { .size = sizeof shape,
                                       .n_layers = n_layers,
                                       .n_kv_heads = 1,
                                       .head_dim = { KVP_MLA_PART, KVP_MLA_PART } };
    kvant_scheme *scheme;
    const bool ok = kvant_scheme_create(&params, &scheme) == KVANT_OK &&
                    kvant_scheme_true_bits(scheme, &shape, bits) == KVANT_OK;
    kvant_scheme_free(&scheme);
    return ok;
}

/* Returns the bits that the plug-in's codecs for latents have. Without such codecs the row stays
 * f16. */
static double latent_bits(const kv_config *config, const struct llama_model *model)
{
    const double row = head_dim(model, "key_length");
    char latents[256], rope[256];
    double most = 0, bits = 0;
    kvant_scheme_info info = { .size = sizeof info };
    if (kvant_scheme_get_info(config->scheme, &info) != KVANT_OK || info.k == NULL ||
        !kvp_mla_spec(info.k, latents, sizeof latents) ||
        !kvp_mla_rope_spec(info.k, rope, sizeof rope) ||
        !part_bits(config, latents, cache_layers(model), &bits))
        return 16;
    if (!part_bits(config, rope, cache_layers(model), &most) || most < bits)
        most = bits;
    return (bits * (row - KVP_MLA_PART) + most * KVP_MLA_PART) / row;
}

void engine_stock_fill(const kv_config *config, double share, engine_fill *fill)
{
    kvp_kv_size *size = &fill->size;
    size->codec_bits = size->numbers[0] * stock_bits(config->type_k) +
                       size->numbers[1] * stock_bits(config->type_v);
    size->bytes = size->codec_bits / 8 / share;
    size->exact = size->transforms = size->working = size->room = size->staging = 0;
    fill->in_place = 0;
}

bool engine_bits(engine *e, const kv_config *config, double *bits)
{
    const struct llama_model *model = engine_model(e, config);
    if (model == NULL)
        return false;
    const kvant_scheme_model shape = shape_of(model);
    if (has_latents(model)) {
        *bits = config->stock ? stock_bits(config->type_k) : latent_bits(config, model);
        return true;
    }
    if (config->stock) {
        const double k = shape.head_dim[KVANT_ROLE_K], v = shape.head_dim[KVANT_ROLE_V];
        *bits = (stock_bits(config->type_k) * k + stock_bits(config->type_v) * v) / (k + v);
        return true;
    }
    if (kvant_scheme_true_bits(config->scheme, &shape, bits) == KVANT_OK)
        return true;
    if (config->path != NULL)
        return complain("--config %s: %s", config->path, kvant_error_message());
    return complain("%s", kvant_error_message());
}

llama_token *engine_tokenize(const engine *e, const char *text, size_t bytes, token_kind kind,
                             size_t *n)
{
    const struct llama_model *model = e->cpu_model != NULL ? e->cpu_model : e->kvant_model;
    if (bytes > INT32_MAX) {
        complain("the text is longer than 2 GiB");
        return NULL;
    }
    if (!text_check("the prompt", text,
                    bytes)) /* of files it is known; a model's chat template comes from anywhere */
        return NULL;
    const struct llama_vocab *vocab = ll.llama_model_get_vocab(model);
    const bool begins = kind != TOKENS_PART, special = kind == TOKENS_CHAT;
    const int32_t needed =
        -ll.llama_tokenize(vocab, text, (int32_t)bytes, NULL, 0, begins, special);
    llama_token *tokens = needed > 0 ? malloc((size_t)needed * sizeof *tokens) : NULL;
    if (tokens == NULL) {
        complain(needed > 0 ? "out of memory for the tokens of the text"
                            : "the text has no tokens");
        return NULL;
    }
    *n = (size_t)ll.llama_tokenize(vocab, text, (int32_t)bytes, tokens, needed, begins, special);
    return tokens;
}
