/* settings_table.c - see settings_table.h. */
#include "settings_table.h"

#include "choices.h"
#include "command.h"
#include "report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const report_column columns[] = {
    { "layer", "layer", COLUMN_NUMBER, 0 },
    { "k", "K", COLUMN_TEXT, 0 },
    { "v", "V", COLUMN_TEXT, 0 },
    { "true_bits_k", "bits K", COLUMN_NUMBER, 3 },
    { "true_bits_v", "bits V", COLUMN_NUMBER, 3 },
    { "kv_heads_k", NULL, COLUMN_NUMBER, 0 },
    { "kv_heads_v", NULL, COLUMN_NUMBER, 0 },
    { "head_dim_k", NULL, COLUMN_NUMBER, 0 },
    { "head_dim_v", NULL, COLUMN_NUMBER, 0 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

typedef struct layer_role {
    kvant_settings_layer shape;
    char *text; /* the specs, as they are shown */
    double bits, numbers;
} layer_role;

/* Its spec, or "a | b", those of its kv heads in order; to be freed. */
static char *layer_specs(const kvant_settings_layer *layer)
{
    const uint32_t n = layer->heads != NULL ? layer->n_kv_heads : 1;
    const char *const *specs = layer->heads != NULL ? layer->heads : &layer->spec;
    size_t room = 1, used = 0;
    for (uint32_t head = 0; head < n; head++)
        room += strlen(specs[head]) + 3;
    char *text = calloc(room, 1);
    for (uint32_t head = 0; text != NULL && head < n; head++)
        used += (size_t)snprintf(text + used, room - used, "%s%s", head > 0 ? " | " : "", specs[head]);
    return text;
}

static bool read_layer(kvant_scheme *scheme, const kvant_settings_info *info, uint32_t layer, kvant_role role, layer_role *out)
{
    const kvant_codec *const *codecs;
    kvant_settings_get_layer(scheme_info(scheme).settings, layer, role, &out->shape);
    const kvant_scheme_place place = { .size = sizeof place,
                                       .role = role,
                                       .layer = layer,
                                       .n_layers = info->n_layers,
                                       .n_kv_heads = out->shape.n_kv_heads,
                                       .head_dim = out->shape.head_dim };
    if (kvant_scheme_codecs(scheme, &place, &codecs) != KVANT_OK)
        return complain("%s", kvant_error_message());
    for (uint32_t head = 0; head < place.n_kv_heads; head++) {
        kvant_codec_info codec = { .size = sizeof codec };
        kvant_codec_get_info(codecs[head], &codec);
        out->bits += codec.true_bits / place.n_kv_heads;
    }
    out->numbers = (double)place.n_kv_heads * place.head_dim;
    out->text = layer_specs(&out->shape);
    if (out->text == NULL)
        complain("out of memory");
    return out->text != NULL;
}

static void print_head(const kvant_settings_info *info, double bits)
{
    if (info->model[0] != 0)
        printf("model        %s\n", info->model);
    printf("layers       %" PRIu32 "\n", info->n_layers);
    if (info->calibration != NULL)
        printf("calibration  %s, checksum %016" PRIx64 "\n", info->calibration, info->calibration_checksum);
    printf("true bits    %.3f\n\n", bits);
}

/* layers: room for 2 of each layer, zeroed. */
static bool print_layers(kvant_scheme *scheme, const kvant_settings_info *info, layer_role *layers,
                         report_cell *cells, bool json)
{
    double sum = 0, numbers = 0;
    for (uint32_t i = 0; i < info->n_layers; i++) {
        layer_role *k = &layers[2 * i], *v = k + 1;
        if (!read_layer(scheme, info, i, KVANT_ROLE_K, k) || !read_layer(scheme, info, i, KVANT_ROLE_V, v))
            return false;
        report_cell *row = cells + (size_t)i * N_COLUMNS;
        *row++ = CELL_NUMBER(i);
        *row++ = CELL_TEXT(k->text);
        *row++ = CELL_TEXT(v->text);
        *row++ = CELL_NUMBER(k->bits);
        *row++ = CELL_NUMBER(v->bits);
        *row++ = CELL_NUMBER(k->shape.n_kv_heads);
        *row++ = CELL_NUMBER(v->shape.n_kv_heads);
        *row++ = CELL_NUMBER(k->shape.head_dim);
        *row++ = CELL_NUMBER(v->shape.head_dim);
        sum += k->bits * k->numbers + v->bits * v->numbers;
        numbers += k->numbers + v->numbers;
    }
    if (!json)
        print_head(info, sum / numbers);
    return report_print(columns, N_COLUMNS, cells, info->n_layers, json);
}

int settings_table_print(const char *path, bool json)
{
    const kvant_scheme_params params = { .size = sizeof params, .settings = path };
    kvant_settings_info info = { .size = sizeof info };
    kvant_scheme *scheme;
    bool told = true;
    if (!scheme_make(&params, &scheme, &told))
        return EXIT_USAGE;
    kvant_settings_get_info(scheme_info(scheme).settings, &info);
    report_cell *cells = calloc(info.n_layers, N_COLUMNS * sizeof *cells);
    layer_role *layers = calloc(2 * (size_t)info.n_layers, sizeof *layers);
    if (cells == NULL || layers == NULL)
        complain("out of memory");
    const bool ok = cells != NULL && layers != NULL && print_layers(scheme, &info, layers, cells, json);
    for (uint32_t i = 0; layers != NULL && i < 2 * info.n_layers; i++)
        free(layers[i].text);
    free(layers);
    free(cells);
    kvant_scheme_free(&scheme);
    return ok ? finish_output() : EXIT_RUNTIME;
}
