/* mla.c - see mla.h. */
#include "mla.h"

#include <stdio.h>
#include <string.h>

bool kvp_mla_has_row(uint64_t row)
{
    return row > 2 * KVP_MLA_PART && row <= KVP_MLA_PART * KVP_MLA_MAX_PARTS &&
           row % KVP_MLA_PART == 0 && (row & (row - 1)) != 0;
}

static bool has_key(const char *option, size_t length, const char *const *keys)
{
    for (; *keys != NULL; keys++)
        if (length >= strlen(*keys) && strncmp(option, *keys, strlen(*keys)) == 0)
            return true;
    return false;
}

/* Copies the options of a spec that begin with one of the keys, or with none of them. */
static bool copy_options(const char *from, const char *const *keys, bool with, char *spec,
                         size_t size)
{
    const char *option = strchr(from, ':');
    size_t used = strlen(spec);
    char separator = ':';

    while (option != NULL) {
        const size_t length = strcspn(++option, ",");
        if (has_key(option, length, keys) == with) {
            if (used + 1 + length >= size)
                return false;
            spec[used] = separator;
            memcpy(spec + used + 1, option, length);
            used += 1 + length;
            spec[used] = '\0';
            separator = ',';
        }
        option = option[length] == ',' ? option + length : NULL;
    }
    return true;
}

bool kvp_mla_spec(const char *keys, char *spec, size_t size)
{
    static const char *const learned[] = { "transform=", "feedback", "center=", "norm=", NULL };
    const size_t length = strcspn(keys, ":");

    if (length >= size)
        return false;
    memcpy(spec, keys, length);
    spec[length] = '\0';
    return copy_options(keys, learned, false, spec, size);
}

/* Both parts of a row must keep the same tokens as fp16, so the options for these are copied. */
bool kvp_mla_rope_spec(const char *keys, char *spec, size_t size)
{
    static const char *const kept[] = { "sink=", "recent=", NULL };

    return snprintf(spec, size, "int-8") < (int)size && copy_options(keys, kept, true, spec, size);
}

static const kvant_codec *codec_at(kvant_scheme *scheme, kvant_scheme_location location,
                                   kvant_codec_info *info)
{
    const kvant_codec *const *codecs;

    location.role = KVANT_ROLE_V;
    location.n_kv_heads = 1;
    location.head_dim = KVP_MLA_PART;
    *info = (kvant_codec_info){ .size = sizeof(*info) };
    return scheme != NULL && kvant_scheme_codecs(scheme, &location, &codecs) == KVANT_OK &&
                   kvant_codec_get_info(codecs[0], info) == KVANT_OK
               ? codecs[0]
               : NULL;
}

static bool learns(const kvant_codec_info *info)
{
    return info->center != KVANT_CENTER_NONE || info->norm != KVANT_NORM_NONE;
}

bool kvp_mla_codecs(const kvp_settings *settings, const kvant_scheme_location *location,
                    uint32_t row, const kvant_codec **codecs)
{
    const uint32_t n = row / KVP_MLA_PART;
    kvant_codec_info latents, rope;
    const kvant_codec *of_latents = codec_at(settings->latents, *location, &latents);
    const kvant_codec *of_rope = codec_at(settings->rope, *location, &rope);

    if (of_latents == NULL || learns(&latents))
        return false;
    if (of_rope == NULL || rope.true_bits < latents.true_bits ||
        rope.sink_tokens != latents.sink_tokens || rope.recent_tokens != latents.recent_tokens ||
        rope.block_tokens != latents.block_tokens)
        of_rope = of_latents;
    for (uint32_t part = 0; part < n; part++)
        codecs[part] = part + 1 < n ? of_latents : of_rope;
    return true;
}

size_t kvp_mla_most_bytes(const kvp_settings *settings, const kvant_scheme_location *location,
                          uint32_t row, const kvant_tensor_params *params)
{
    const kvant_codec *codecs[KVP_MLA_MAX_PARTS];
    kvant_scheme_location at = *location;
    kvant_tensor_params of = *params;
    size_t bytes, most = 0;

    of.codecs = codecs;
    of.n_kv_heads = row / KVP_MLA_PART;
    for (at.n_layers = 0; at.n_layers <= at.layer + 1; at.n_layers += at.layer + 1) {
        if (!kvp_mla_codecs(settings, &at, row, codecs) ||
            kvant_tensor_size(&of, &bytes) != KVANT_OK)
            return 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

void kvp_mla_describe(const kvp_settings *settings, char *text, size_t size)
{
    const kvant_scheme_location location = { .size = sizeof(location) };
    kvant_scheme_info latents = { .size = sizeof(latents) }, rope = { .size = sizeof(rope) };
    const kvant_codec *codecs[2];

    text[0] = '\0';
    if (!kvp_mla_codecs(settings, &location, 2 * KVP_MLA_PART, codecs))
        return;
    kvant_scheme_get_info(settings->latents, &latents);
    kvant_scheme_get_info(settings->rope, &rope);
    snprintf(text, size, "; MLA: latents %s, RoPE channels %s", latents.k,
             codecs[0] == codecs[1] ? latents.k : rope.k);
}
