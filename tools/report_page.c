/* report_page.c - fills tools/page/page.html with style, scripts and data. */
#include "report_page.h"

#include "command.h"
#include "report_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Made from tools/page and the plotting library by cmake/embed.cmake. */
extern const unsigned char page_html[], page_css[], page_js[], page_library[], page_licences[];
extern const size_t page_html_size, page_css_size, page_js_size, page_library_size, page_licences_size;

bool report_page_has_figures(void)
{
    return page_library_size > 0;
}

/* JSON inside HTML: "<" stands in strings only, where JSON has another way to write it; so nothing in a name ends the script. */
static void write_data(FILE *file, const char *json)
{
    for (const char *p = json; *p != 0; p++)
        if (*p == '<')
            fputs("\\u003c", file);
        else
            putc(*p, file);
}

static void write_part(FILE *file, const char *name, size_t n, const char *json)
{
    const struct {
        const char *name;
        const unsigned char *bytes;
        size_t size;
    } parts[] = {
        { "style", page_css, page_css_size },
        { "library", page_library, page_library_size },
        { "script", page_js, page_js_size },
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strlen(parts[i].name) == n && memcmp(parts[i].name, name, n) == 0)
            fwrite(parts[i].bytes, 1, parts[i].size, file);
    if (n == 4 && memcmp(name, "data", 4) == 0)
        write_data(file, json);
}

/* The template has names in double braces. */
static void write_page(FILE *file, const char *json)
{
    const char *p = (const char *)page_html, *end = p + page_html_size;
    while (p < end) {
        const char *mark = strstr(p, "{{"), *close = mark != NULL ? strstr(mark, "}}") : NULL;
        if (close == NULL) {
            fwrite(p, 1, (size_t)(end - p), file);
            return;
        }
        fwrite(p, 1, (size_t)(mark - p), file);
        write_part(file, mark + 2, (size_t)(close - mark - 2), json);
        p = close + 2;
    }
}

static char *print_data(const cJSON *data)
{
    char *json = NULL, *licences = malloc(page_licences_size + 1);
    cJSON *copy = cJSON_Duplicate(data, 1);
    if (copy != NULL && licences != NULL) {
        memcpy(licences, page_licences, page_licences_size);
        licences[page_licences_size] = 0;
        if (page_licences_size == 0 || cJSON_AddStringToObject(copy, "licences", licences) != NULL)
            json = cJSON_PrintUnformatted(copy);
    }
    cJSON_Delete(copy);
    free(licences);
    if (json == NULL)
        complain("report: out of memory");
    return json;
}

static void write_json_page(FILE *file, const void *user)
{
    write_page(file, user);
}

bool report_page_write(const char *path, const cJSON *data)
{
    char *json = print_data(data);
    const bool ok = json != NULL && report_file_replace(path, write_json_page, json);
    cJSON_free(json);
    return ok;
}
