/* kivi.c - `kivi-2`, `kivi-4` (KIVI, as set up in InnerQ, section 5): asymmetric groups across the
 * dimension that attention sums over, behind a window of recent fp16 tokens. Groups are tokens of a
 * channel for K and channels of a token for V.
 *
 * uniform.c is the quantiser; the cache keeps the window. */

#include "../uniform.h"

typedef struct kivi_options {
    int32_t group;
} kivi_options;

static const kvant_option table[] = { KVANT_TILES_OPTION(kivi_options), { .key = NULL } };

static kvant_status create_kivi(kvant_codec *codec, const kvant_request *request,
                                const kvant_error *error)
{
    const kivi_options *o = request->options;
    bool key = codec->info.role == KVANT_ROLE_K;
    uint32_t bits;
    KVANT_FORWARD(kvant_spec_bits(request->spec, 2, 8, &bits, error));
    KVANT_FORWARD(kvant_codec_set_transform(codec, request,
                                            KVANT_TRANSFORM_BLOCKS(KVANT_ROTATE_NONE), error));
    KVANT_FORWARD(kvant_uniform_init(codec, bits, KVANT_UNIFORM_ASYM, key, 16u << o->group, error));
    codec->info.nominal_bits = kvant_uniform_nominal_bits(codec);
    codec->info.recent_tokens = 128;
    kvant_codec_describe(codec, table, o, "%s-%u", request->spec->name, (unsigned)bits);
    return KVANT_OK;
}

KVANT_FAMILY(kivi, "2 3 4 5 6 7 8", "KIVI, as InnerQ's section 5",
             "K per channel and V per token, asymmetric in groups of 32; recent tokens stay fp16",
             table, kvant_common_options, create_kivi)
