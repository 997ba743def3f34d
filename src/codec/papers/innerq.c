/* innerq.c - `innerq-base`, `innerq-hybrid`, `innerq-small` (InnerQ, section 4): groups along the
 * dimension that attention sums over, so channels of a token for K and tokens of a channel for V.
 *
 * Owns what the three names mean. The quantiser is uniform.c's; windows and the normalisation of keys are
 * the cache's, which this file only asks for. */
#include <stdio.h>
#include <string.h>

#include "../uniform.h"

typedef struct variant {
    const char *name;
    uint32_t value_bits;
    bool hybrid;
} variant;

/* Keys have 3 bits, symmetric, in all of them. */
static const variant variants[] = { { "base", 3, false }, { "hybrid", 2, true }, { "small", 2, false } };

static kvant_status read_variant(const kvant_spec *spec, const variant **found, const kvant_error *error)
{
    for (size_t i = 0; spec->variant && i < sizeof variants / sizeof variants[0]; i++)
        if (strcmp(spec->variant, variants[i].name) == 0) {
            *found = &variants[i];
            return KVANT_OK;
        }
    return kvant_fail(error, KVANT_ERR_SPEC, "innerq comes as innerq-base, innerq-hybrid and innerq-small");
}

/* Only values are ever hybrid, but one spec serves both roles, so keys take the option too. */
static kvant_status read_mode(kvant_spec *spec, const variant *v, kvant_role role, kvant_uniform_mode *mode,
                              const kvant_error *error)
{
    kvant_uniform_mode hybrid = KVANT_UNIFORM_HYBRID_PAPER;
    if (v->hybrid)
        KVANT_FORWARD(kvant_uniform_read_hybrid(spec, &hybrid, error));
    *mode = v->hybrid && role == KVANT_ROLE_V ? hybrid : KVANT_UNIFORM_SYM;
    return KVANT_OK;
}

static kvant_status create_innerq(kvant_codec *codec, kvant_spec *spec, const kvant_site *site,
                                  const kvant_error *error)
{
    static const kvant_transform_defaults defaults = { KVANT_ROTATE_NONE, 128, false };
    const variant *v = NULL;
    kvant_uniform_mode mode = KVANT_UNIFORM_SYM;
    bool key = codec->info.role == KVANT_ROLE_K;
    uint32_t group = 32;
    KVANT_FORWARD(read_variant(spec, &v, error));
    uint32_t bits = key ? 3 : v->value_bits;
    KVANT_FORWARD(read_mode(spec, v, codec->info.role, &mode, error));
    KVANT_FORWARD(kvant_uniform_read_group(spec, &group, error));
    KVANT_FORWARD(
        kvant_transform_create(&codec->transform, spec, &defaults, codec->info.head_dim, site->seed, error));
    KVANT_FORWARD(kvant_uniform_init(codec, bits, mode, !key, group, error));
    codec->info.nominal_bits = kvant_uniform_nominal_bits(codec);
    codec->info.sink_tokens = 32;
    codec->info.recent_tokens = 96;
    codec->info.norm = key ? KVANT_NORM_FIRST : KVANT_NORM_NONE;
    snprintf(codec->spec, sizeof codec->spec, "innerq-%s:group=%u", v->name, (unsigned)group);
    if (kvant_uniform_is_hybrid(kvant_uniform_of(codec)))
        kvant_append(codec->spec, sizeof codec->spec, ",%s", kvant_uniform_mode_name(mode));
    kvant_transform_describe(&codec->transform, codec->spec, sizeof codec->spec);
    return KVANT_OK;
}

const kvant_family kvant_family_innerq = {
    { sizeof(kvant_codec_family), "innerq", "base hybrid small", "group=16|32|64 hybrid=paper|code",
      KVANT_TRANSFORM_OPTIONS, "InnerQ, section 4",
      "K per token and V per channel in groups of 32: base, hybrid, small; fp16 windows" },
    create_innerq
};
