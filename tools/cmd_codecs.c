/* cmd_codecs.c - `kvant codecs`: a short list of presets and families, or every family at every
 * width with its true size at a head_dim. */
#include "args.h"
#include "choices.h"
#include "command.h"
#include "os.h"
#include "report.h"

#include <kvant/calibration.h>
#include <kvant/codec.h>
#include <kvant/scheme.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    uint32_t head_dim;
    const char *config;
    bool all, json;
} settings;
#define AT(member) offsetof(settings, member)

static const arg_option options[] = {
    ARG_SWITCH('a', "all", all, "every codec at every width with its codec bits, and all options"),
    ARG_U32('d', "head-dim", "N", 1, KVANT_MAX_HEAD_DIM, head_dim,
            "head dimension to count bits for, 1 to 512 (default 128)"),
    ARG_TEXT(0, "config", "FILE", config, "the codecs of a settings file instead, layer by layer"),
    ARG_SWITCH(0, "json", json, "one JSON array of flat objects"),
};

static const arg_spec spec = {
    .command = "codecs",
    .usage = "[--all] [--head-dim N | --config FILE] [--json]",
    .about =
        "Lists presets and codecs. Bits are codec bits per number: every stored byte of a page\n"
        "counts, scales and padding included. A cache keeps more than pages: kvant inspect -c\n"
        "counts all of it. Nominal bits are what the paper counts, the mean of K and V.",
    ARG_OPTIONS(options),
    .notes = "A spec is name[-bits][:key=value,...], for example trellis-4:center=first or "
             "int-4:group=32,sym.",
};

typedef struct listing {
    report_rows rows;
    codec_name names[MAX_CODEC_NAMES];
    size_t n;
    kvant_calibration *zeros_calibration;
} listing;

static const char *or_absent(const char *text)
{
    return text[0] != 0 ? text : NULL;
}

/* Bits are NaN when the codec does not exist at this head_dim. */
static kvant_codec_info info_of(listing *list, const char *name, uint32_t head_dim, kvant_role role)
{
    kvant_codec_info info = { .size = sizeof info, .true_bits = NAN, .nominal_bits = NAN };
    kvant_codec *codec = NULL;
    const kvant_status status = kvant_codec_create_calibrated(
        name, head_dim, role, 0, list->zeros_calibration, 0, 0, &codec, NULL, 0);
    if (status == KVANT_OK)
        kvant_codec_get_info(codec, &info);
    list->rows.no_memory |= status == KVANT_ERR_MEMORY;
    kvant_codec_free(&codec);
    return info;
}

static double page_bytes(const kvant_codec_info *info)
{
    return info->page_bytes > 0 ? (double)info->page_bytes : NAN;
}

/* A codec that does not exist at this head_dim keeps its line, with absent numbers. A list that
 * silently changed its length would read as if the family were gone. */
static void add_row(listing *list, const codec_name *name, uint32_t head_dim)
{
    const kvant_codec_family *family = &name->family;
    const kvant_codec_info k = info_of(list, name->text, head_dim, KVANT_ROLE_K);
    const kvant_codec_info v = info_of(list, name->text, head_dim, KVANT_ROLE_V);
    report_rows *row = &list->rows;
    report_row(row);
    report_text(row, "spec", "spec", name->text);
    report_text(row, "family", NULL, family->name);
    report_number(row, "head_dim", NULL, 0, head_dim);
    report_number(row, "true_bits", NULL, 3, (k.true_bits + v.true_bits) / 2);
    report_number(row, "true_bits_k", "bits K", 3, k.true_bits);
    report_number(row, "true_bits_v", "bits V", 3, v.true_bits);
    report_number(row, "nominal_bits", "nominal", 3, (k.nominal_bits + v.nominal_bits) / 2);
    report_number(row, "page_bytes_k", NULL, 0, page_bytes(&k));
    report_number(row, "page_bytes_v", NULL, 0, page_bytes(&v));
    report_text(row, "options", NULL, or_absent(family->options));
    report_text(row, "common_options", NULL, or_absent(family->common_options));
    report_text(row, "source", "source", family->source);
    report_text(row, "summary", NULL, family->summary);
}

/* Prints each family's options once, because they do not depend on the width. The last line has the
 * options that families have in common. A family with another list of common options shows its own
 * list. */
static void print_options(void)
{
    const char *usual = "";
    puts("\noptions, as in trellis-4:center=first");
    for (size_t i = 0; i < kvant_codec_family_count(); i++) {
        kvant_codec_family family = { .size = sizeof family };
        if (kvant_codec_family_get(i, &family) != KVANT_OK || family.common_options[0] == 0)
            continue;
        if (usual[0] == 0)
            usual = family.common_options;
        const bool same = strcmp(usual, family.common_options) == 0;
        printf("  %-12s %s%s%s\n", family.name, family.options, same ? "" : " ",
               same ? "" : family.common_options);
    }
    printf("  %-12s %s\n", "and each", usual);
}

static bool print_all(listing *list, bool json)
{
    const bool ok = report_print(&list->rows, "codecs", json);
    if (ok && !json)
        print_options();
    return ok;
}

/* A list with missing numbers would read as if those codecs did not exist, so nothing is printed
 * when memory is short. */
static void fill(listing *list, uint32_t head_dim)
{
    /* A codec's size depends on its options and not on a calibration's numbers, so a calibration of
     * zeros shows the sizes of calibrated codecs. */
    enum { N_ROWS = 256 };
    float *zeros = calloc((size_t)N_ROWS * head_dim, sizeof *zeros);
    if (zeros != NULL)
        list->zeros_calibration =
            calibration_of((const float *const[]){ zeros, zeros }, N_ROWS, 1, head_dim, NULL);
    free(zeros);
    list->n = codec_names(list->names);
    for (size_t i = 0; i < list->n && list->zeros_calibration != NULL; i++)
        add_row(list, &list->names[i], head_dim);
    list->rows.no_memory |= list->zeros_calibration == NULL;
    kvant_calibration_free(&list->zeros_calibration);
}

/* The bits of a preset for a model of 64 layers, in which the preset's fractions of layers are
 * whole numbers, or nearly so. */
static double bits_of_preset(report_rows *out, const char *name, uint32_t head_dim)
{
    const kvant_scheme_params params = { .size = sizeof params, .preset = name };
    const kvant_scheme_model model = {
        .size = sizeof model, .n_layers = 64, .n_kv_heads = 1, .head_dim = { head_dim, head_dim }
    };
    kvant_scheme *scheme = NULL;
    double bits = 0;
    kvant_status status = kvant_scheme_create(&params, &scheme);
    if (status == KVANT_OK)
        status = kvant_scheme_true_bits(scheme, &model, &bits);
    out->no_memory |= status == KVANT_ERR_MEMORY;
    kvant_scheme_free(&scheme);
    return bits;
}

static bool print_presets(uint32_t head_dim)
{
    static const char *const names[] = { "quality", "balanced", "small", "tiny" };
    report_rows out = { .n_rows = 0 };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        kvant_preset preset = { .size = sizeof preset };
        kvant_preset_get(names[i], 0, &preset);
        const char *summary = strstr(preset.summary, ": ");
        report_row(&out);
        report_text(&out, NULL, "preset", names[i]);
        report_number(&out, NULL, "bits", 2, bits_of_preset(&out, names[i], head_dim));
        report_text(&out, NULL, "for", summary != NULL ? summary + 2 : preset.summary);
    }
    return report_print(&out, "codecs", REPORT_TABLE);
}

/* Prints the list that most users look for: presets and the names of families. */
static bool print_short_list(uint32_t head_dim)
{
    report_rows out = { .n_rows = 0 };
    if (!print_presets(head_dim))
        return false;
    for (size_t i = 0; i < kvant_codec_family_count(); i++) {
        kvant_codec_family family = { .size = sizeof family };
        kvant_codec_family_get(i, &family);
        report_row(&out);
        report_text(&out, NULL, "codec", family.name);
        report_text(&out, NULL, "bits", or_absent(family.variants));
        report_text(&out, NULL, "how", family.summary);
    }
    putchar('\n');
    const bool ok = report_print(&out, "codecs", REPORT_TABLE);
    puts("\n--preset balanced is the default; -k trellis-4 or -k trellis-4 -v trellis-3 chooses "
         "codecs.\n"
         "kvant codecs --all: every codec at every width with its codec bits, source and options");
    return ok;
}

/* A settings file, layer by layer */

typedef struct layer_role {
    kvant_settings_layer shape;
    char *text; /* the specs, as they are shown */
    double bits, numbers;
} layer_role;

/* The spec of a layer, or "a | b" with the specs of its kv heads in order; to be freed. */
static char *layer_specs(const kvant_settings_layer *layer)
{
    os_stream out;
    const uint32_t n = !os_stream_open(&out) ? 0 : layer->heads != NULL ? layer->n_kv_heads : 1;
    for (uint32_t head = 0; head < n; head++)
        fprintf(out.file, "%s%s", head > 0 ? " | " : "",
                layer->heads != NULL ? layer->heads[head] : layer->spec);
    return os_stream_text(&out, NULL);
}

static bool read_layer(kvant_scheme *scheme, const kvant_settings_info *info, uint32_t layer,
                       kvant_role role, layer_role *out)
{
    const kvant_codec *const *codecs;
    kvant_settings_get_layer(scheme_info(scheme).settings, layer, role, &out->shape);
    const kvant_scheme_location location = { .size = sizeof location,
                                             .role = role,
                                             .layer = layer,
                                             .n_layers = info->n_layers,
                                             .n_kv_heads = out->shape.n_kv_heads,
                                             .head_dim = out->shape.head_dim };
    if (kvant_scheme_codecs(scheme, &location, &codecs) != KVANT_OK)
        return complain("%s", kvant_error_message());
    for (uint32_t head = 0; head < location.n_kv_heads; head++) {
        kvant_codec_info codec = { .size = sizeof codec };
        kvant_codec_get_info(codecs[head], &codec);
        out->bits += codec.true_bits / location.n_kv_heads;
    }
    out->numbers = (double)location.n_kv_heads * location.head_dim;
    out->text = layer_specs(&out->shape);
    if (out->text == NULL)
        complain("codecs: out of memory");
    return out->text != NULL;
}

static void print_head(const kvant_settings_info *info, double bits)
{
    if (info->model[0] != 0) {
        fputs("model        ", stdout);
        print_plain(stdout, info->model);
        putchar('\n');
    }
    printf("layers       %" PRIu32 "\n", info->n_layers);
    if (info->calibration != NULL) {
        fputs("calibration  ", stdout);
        print_plain(stdout, info->calibration);
        printf(", checksum %016" PRIx64 "\n", info->calibration_checksum);
    }
    printf("codec bits   %.3f\n\n", bits);
}

/* layers: room for 2 of each layer, zeroed. */
static bool print_layers(kvant_scheme *scheme, const kvant_settings_info *info, layer_role *layers,
                         report_rows *out, bool json)
{
    double sum = 0, numbers = 0;
    for (uint32_t i = 0; i < info->n_layers; i++) {
        layer_role *k = &layers[2 * i], *v = k + 1;
        if (!read_layer(scheme, info, i, KVANT_ROLE_K, k) ||
            !read_layer(scheme, info, i, KVANT_ROLE_V, v))
            return false;
        report_row(out);
        report_number(out, "layer", "layer", 0, i);
        report_text(out, "k", "K", k->text);
        report_text(out, "v", "V", v->text);
        report_number(out, "true_bits_k", "bits K", 3, k->bits);
        report_number(out, "true_bits_v", "bits V", 3, v->bits);
        report_number(out, "kv_heads_k", NULL, 0, k->shape.n_kv_heads);
        report_number(out, "kv_heads_v", NULL, 0, v->shape.n_kv_heads);
        report_number(out, "head_dim_k", NULL, 0, k->shape.head_dim);
        report_number(out, "head_dim_v", NULL, 0, v->shape.head_dim);
        sum += k->bits * k->numbers + v->bits * v->numbers;
        numbers += k->numbers + v->numbers;
    }
    if (!json)
        print_head(info, sum / numbers);
    return report_print(out, "codecs", json);
}

static int print_settings(const char *path, bool json)
{
    const kvant_scheme_params params = { .size = sizeof params, .settings = path };
    kvant_settings_info info = { .size = sizeof info };
    kvant_scheme *scheme;
    report_rows out = { .n_rows = 0 };
    bool told = true;
    if (!scheme_make(&params, &scheme, &told))
        return EXIT_USAGE;
    kvant_settings_get_info(scheme_info(scheme).settings, &info);
    layer_role *layers = calloc(2 * (size_t)info.n_layers, sizeof *layers);
    if (layers == NULL)
        complain("codecs: out of memory");
    const bool ok = layers != NULL && print_layers(scheme, &info, layers, &out, json);
    for (uint32_t i = 0; layers != NULL && i < 2 * info.n_layers; i++)
        free(layers[i].text);
    free(layers);
    report_free(&out);
    kvant_scheme_free(&scheme);
    return ok ? EXIT_OK : EXIT_RUNTIME;
}

int command_codecs(int argc, char **argv)
{
    settings s = { .head_dim = 128 };
    const int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (s.config != NULL)
        return print_settings(s.config, s.json);
    if (!s.all && !s.json)
        return print_short_list(s.head_dim) ? finish_output() : EXIT_RUNTIME;
    static listing list;
    fill(&list, s.head_dim);
    return print_all(&list, s.json) ? finish_output() : EXIT_RUNTIME;
}
