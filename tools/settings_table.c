/* settings_table.c - see settings_table.h. */
#include "settings_table.h"

#include "choices.h"
#include "command.h"
#include "report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

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

static bool count_bits(const settings_file *file, uint32_t layer, kvant_role role, layer_role *out)
{
    const uint32_t n = out->shape.heads != NULL ? out->shape.n_kv_heads : 1;
    kvant_settings_layer one = out->shape;
    for (uint32_t head = 0; head < n; head++) {
        double bits;
        one.spec = out->shape.heads != NULL ? out->shape.heads[head] : out->shape.spec;
        if (!codec_true_bits(&one, role, layer, file->calibration, &bits))
            return false;
        out->bits += bits / n;
    }
    return true;
}

static bool read_layer(const settings_file *file, uint32_t layer, kvant_role role, layer_role *out)
{
    kvant_settings_get_layer(file->settings, layer, role, &out->shape);
    out->numbers = (double)out->shape.n_kv_heads * out->shape.head_dim;
    out->text = layer_specs(&out->shape);
    if (out->text == NULL)
        complain("out of memory");
    return out->text != NULL && count_bits(file, layer, role, out);
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
static bool print_layers(const settings_file *file, const kvant_settings_info *info, layer_role *layers,
                         report_cell *cells, bool json)
{
    double sum = 0, numbers = 0;
    for (uint32_t i = 0; i < info->n_layers; i++) {
        layer_role *k = &layers[2 * i], *v = k + 1;
        if (!read_layer(file, i, KVANT_ROLE_K, k) || !read_layer(file, i, KVANT_ROLE_V, v))
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
    settings_file file;
    kvant_settings_info info = { .size = sizeof info };
    if (!settings_file_load("--config", path, NULL, &file))
        return EXIT_USAGE;
    kvant_settings_get_info(file.settings, &info);
    report_cell *cells = calloc(info.n_layers, N_COLUMNS * sizeof *cells);
    layer_role *layers = calloc(2 * (size_t)info.n_layers, sizeof *layers);
    if (cells == NULL || layers == NULL)
        complain("out of memory");
    const bool ok = cells != NULL && layers != NULL && print_layers(&file, &info, layers, cells, json);
    for (uint32_t i = 0; layers != NULL && i < 2 * info.n_layers; i++)
        free(layers[i].text);
    free(layers);
    free(cells);
    settings_file_free(&file);
    return ok ? finish_output() : EXIT_RUNTIME;
}
