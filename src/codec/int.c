/* int.c - two families of uniform codes: `int`, a baseline of three papers, and `bdr`, int behind a
 * block-diagonal Hadamard rotation (SAW-INT4, section 3). uniform.c is the quantiser. */
#include "uniform.h"

typedef struct int_options {
    int32_t group, sym, asym, hybrid, axis;
} int_options;

static const char *const axis_names[] = { "token", "channel", NULL };

static const kvant_option table[] = {
    KVANT_GROUP_OPTION(int_options),
    KVANT_FLAG(int_options, sym, "levels on both sides of 0, no zero point"),
    KVANT_FLAG(int_options, asym, "levels from the smallest number to the largest"),
    KVANT_HYBRID_OPTION(int_options),
    KVANT_CHOICE(int_options, axis, axis_names, 0, "groups of channels of a token, or the reverse"),
    { .key = NULL },
};

static kvant_status choose_mode(int_options *o, kvant_uniform_mode *mode, const kvant_error *error)
{
    bool hybrid = o->hybrid != KVANT_OPTION_ABSENT;
    if (o->sym + o->asym + hybrid > 1)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "sym, asym and hybrid exclude each other: give one of them");
    o->asym = !o->sym && !hybrid;
    *mode = o->sym   ? KVANT_UNIFORM_SYM
            : hybrid ? kvant_uniform_hybrid(o->hybrid)
                     : KVANT_UNIFORM_ASYM;
    return KVANT_OK;
}

static kvant_status create_uniform(kvant_codec *codec, const kvant_request *request,
                                   kvant_rotate rotate, const kvant_error *error)
{
    kvant_uniform_mode mode = KVANT_UNIFORM_ASYM;
    int_options o = *(const int_options *)request->options;
    uint32_t bits;
    KVANT_FORWARD(kvant_spec_bits(request->spec, 2, 8, &bits, error));
    KVANT_FORWARD(choose_mode(&o, &mode, error));
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, KVANT_TRANSFORM_BLOCKS(rotate), error));
    KVANT_FORWARD(kvant_uniform_init(codec, bits, mode, o.axis == 1, (uint32_t)o.group, error));
    o.group = (int32_t)kvant_uniform_of(codec)->group;
    kvant_codec_describe(codec, table, &o, "%s-%u", request->spec->name, (unsigned)bits);
    return KVANT_OK;
}

static kvant_status create_int(kvant_codec *codec, const kvant_request *request,
                               const kvant_error *error)
{
    return create_uniform(codec, request, KVANT_ROTATE_NONE, error);
}

/* The authors' program has a fixed Hadamard matrix in blocks of up to 128 channels; the paper's
 * text has random signs (`signs=seed`). */
static kvant_status create_bdr(kvant_codec *codec, const kvant_request *request,
                               const kvant_error *error)
{
    return create_uniform(codec, request, KVANT_ROTATE_HADAMARD, error);
}

KVANT_FAMILY(int, "2 3 4 5 6 7 8", "baseline of HQMQ, SAW-INT4 and InnerQ",
             "uniform quantisation, per token or per channel, in groups", table,
             kvant_common_options_ordered, create_int)

KVANT_FAMILY(bdr, "2 3 4 5 6 7 8", "SAW-INT4, section 3",
             "block-diagonal Hadamard rotation, then per-token asymmetric int", table,
             kvant_common_options_ordered, create_bdr)
