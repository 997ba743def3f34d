/* innerq.c - `innerq-base`, `innerq-hybrid`, `innerq-small` (InnerQ, section 4): groups along the
 * dimension that attention sums over. These are channels of a token for K and tokens of a channel
 * for V.
 *
 * Owns the meaning of the three names. uniform.c is the quantiser. The cache does windows and the
 * normalisation of keys; this file only asks for them. */
#include <string.h>

#include "../uniform.h"

typedef struct variant {
    const char *name;
    uint32_t value_bits;
    bool hybrid;
} variant;

/* Keys have 3 bits, symmetric, in all of them. */
static const variant variants[] = { { "base", 3, false },
                                    { "hybrid", 2, true },
                                    { "small", 2, false } };

static kvant_status read_variant(const kvant_spec *spec, const variant **found,
                                 const kvant_error *error)
{
    for (size_t i = 0; spec->variant && i < sizeof variants / sizeof variants[0]; i++)
        if (strcmp(spec->variant, variants[i].name) == 0) {
            *found = &variants[i];
            return KVANT_OK;
        }
    return kvant_fail(error, KVANT_ERR_SPEC,
                      "innerq needs a variant: innerq-base, innerq-hybrid or innerq-small");
}

typedef struct innerq_options {
    int32_t group, hybrid;
} innerq_options;

static const kvant_option table[] = { KVANT_TILES_OPTION(innerq_options),
                                      KVANT_HYBRID_OPTION(innerq_options),
                                      { .key = NULL } };

/* Only values are ever hybrid, but one spec serves both roles, so keys take the option too. */
static kvant_status choose_mode(const variant *v, kvant_role role, innerq_options *o,
                                kvant_uniform_mode *mode, const kvant_error *error)
{
    if (!v->hybrid && o->hybrid != KVANT_OPTION_ABSENT)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "innerq-%s has no option 'hybrid': use innerq-hybrid", v->name);
    if (v->hybrid && o->hybrid == KVANT_OPTION_ABSENT)
        o->hybrid = 0;
    if (role == KVANT_ROLE_K)
        o->hybrid = KVANT_OPTION_ABSENT;
    *mode = o->hybrid == KVANT_OPTION_ABSENT ? KVANT_UNIFORM_SYM : kvant_uniform_hybrid(o->hybrid);
    return KVANT_OK;
}

static kvant_status create_innerq(kvant_codec *codec, const kvant_request *request,
                                  const kvant_error *error)
{
    innerq_options o = *(const innerq_options *)request->options;
    const variant *v = NULL;
    kvant_uniform_mode mode = KVANT_UNIFORM_SYM;
    bool key = codec->info.role == KVANT_ROLE_K;
    KVANT_FORWARD(read_variant(request->spec, &v, error));
    KVANT_FORWARD(choose_mode(v, codec->info.role, &o, &mode, error));
    KVANT_FORWARD(kvant_codec_set_transform(codec, request,
                                            KVANT_TRANSFORM_BLOCKS(KVANT_ROTATE_NONE), error));
    KVANT_FORWARD(
        kvant_uniform_init(codec, key ? 3 : v->value_bits, mode, !key, 16u << o.group, error));
    codec->info.nominal_bits = kvant_uniform_nominal_bits(codec);
    codec->info.sink_tokens = 32;
    codec->info.recent_tokens = 96;
    codec->info.norm = key ? KVANT_NORM_FIRST : KVANT_NORM_NONE;
    kvant_codec_describe(codec, table, &o, "innerq-%s", v->name);
    return KVANT_OK;
}

KVANT_FAMILY(innerq, "base hybrid small", "InnerQ, section 4",
             "K per token and V per channel in groups of 32: base, hybrid, small; fp16 windows",
             table, kvant_common_options_ordered, create_innerq)
