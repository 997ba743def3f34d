/* report_file.c - load, check, change, save. */
#include "report_file.h"

#include "choices.h"
#include "command.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 1
#define MAX_BYTES (256L << 20)

bool report_file_replace(const char *path, void (*write)(FILE *file, const void *user), const void *user)
{
    char beside[4096];
    if (snprintf(beside, sizeof beside, "%s.part", path) >= (int)sizeof beside) {
        complain("report: the path %.64s... is too long", path);
        return false;
    }
    errno = 0;
    FILE *file = fopen(beside, "wb");
    bool ok = file != NULL;
    if (ok) {
        write(file, user);
        ok = !ferror(file);
        ok = fclose(file) == 0 && ok;
    }
    if (ok && rename(beside, path) == 0)
        return true;
    complain("report: cannot write %s: %s", path, strerror(errno));
    if (file != NULL)
        remove(beside);
    return false;
}

static char *read_file(const char *path)
{
    char *text = NULL;
    FILE *file = fopen(path, "rb");
    const long size = file != NULL && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    if (size < 0)
        complain("report: %s: %s", path, strerror(errno));
    else if (size > MAX_BYTES)
        complain("report: %s is larger than any result", path);
    else if ((text = malloc((size_t)size + 1)) == NULL)
        complain("report: out of memory");
    if (text != NULL) {
        rewind(file);
        text[fread(text, 1, (size_t)size, file)] = 0;
    }
    if (file != NULL)
        fclose(file);
    return text;
}

/* What the program itself reads; NULL when it is there. */
static const char *judge(const cJSON *root)
{
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(root, "kvant_report"), *step;
    const cJSON *steps = cJSON_GetObjectItemCaseSensitive(root, "steps");
    if (!cJSON_IsObject(root) || !cJSON_IsNumber(version))
        return "is no result of kvant report";
    if (version->valueint != VERSION)
        return "is of another version of kvant report";
    if (!cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(root, "about")) || !cJSON_IsArray(steps))
        return "has no \"about\" or no \"steps\"";
    cJSON_ArrayForEach(step, steps)
    {
        const cJSON *rows = cJSON_GetObjectItemCaseSensitive(step, "rows"), *row;
        if (!cJSON_IsString(cJSON_GetObjectItemCaseSensitive(step, "name")) || !cJSON_IsArray(rows))
            return "has a step without a name or rows";
        cJSON_ArrayForEach(row, rows) if (!cJSON_IsObject(row)) return "has a row that is no object";
    }
    return NULL;
}

cJSON *report_file_load(const char *path)
{
    char *text = read_file(path);
    if (text == NULL)
        return NULL;
    cJSON *root = cJSON_Parse(text);
    free(text);
    const char *wrong = root == NULL ? "is no JSON" : judge(root);
    if (wrong == NULL)
        return root;
    complain("report: %s %s", path, wrong);
    cJSON_Delete(root);
    return NULL;
}

static void write_text(FILE *file, const void *text)
{
    fputs(text, file);
    putc('\n', file);
}

bool report_file_save(const char *path, const cJSON *results)
{
    char *text = cJSON_Print(results);
    if (text == NULL)
        complain("report: out of memory");
    const bool ok = text != NULL && report_file_replace(path, write_text, text);
    cJSON_free(text);
    return ok;
}

cJSON *report_file_new(void)
{
    cJSON *root = cJSON_CreateObject();
    if (root != NULL && cJSON_AddNumberToObject(root, "kvant_report", VERSION) != NULL &&
        cJSON_AddFalseToObject(root, "complete") != NULL && cJSON_AddObjectToObject(root, "about") != NULL &&
        cJSON_AddArrayToObject(root, "steps") != NULL)
        return root;
    cJSON_Delete(root);
    return NULL;
}

const char *report_file_about(const cJSON *results, const char *key)
{
    const cJSON *about = cJSON_GetObjectItemCaseSensitive(results, "about");
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(about, key));
    return text != NULL ? text : "";
}

cJSON *report_file_step(const cJSON *results, const char *name)
{
    cJSON *step;
    cJSON_ArrayForEach(step, cJSON_GetObjectItemCaseSensitive(results, "steps"))
    {
        if (strcmp(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(step, "name")), name) == 0)
            return step;
    }
    return NULL;
}

/* A report is shown to others, and says nothing of the folders of the machine that made it. */
static void drop_folders(cJSON *rows)
{
    const cJSON *row = NULL;
    cJSON_ArrayForEach(row, rows)
    {
        char *path = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(row, "calibration"));
        if (path != NULL)
            memmove(path, file_name(path), strlen(file_name(path)) + 1);
    }
}

bool report_file_set_step(cJSON *results, const char *name, const char *command, const char *state, double seconds,
                          cJSON *rows)
{
    cJSON *steps = cJSON_GetObjectItemCaseSensitive(results, "steps"), *old = report_file_step(results, name);
    cJSON *step = cJSON_CreateObject();
    drop_folders(rows);
    if (rows == NULL)
        rows = cJSON_CreateArray();
    if (step == NULL || rows == NULL || cJSON_AddStringToObject(step, "name", name) == NULL ||
        cJSON_AddStringToObject(step, "command", command) == NULL ||
        cJSON_AddStringToObject(step, "state", state) == NULL ||
        cJSON_AddNumberToObject(step, "seconds", seconds) == NULL || !cJSON_AddItemToObject(step, "rows", rows)) {
        cJSON_Delete(rows); /* adding it is the last that can fail */
        cJSON_Delete(step);
        complain("report: out of memory");
        return false;
    }
    return old != NULL ? cJSON_ReplaceItemViaPointer(steps, old, step) : cJSON_AddItemToArray(steps, step);
}

bool report_file_has(const cJSON *results, const char *name, const char *command)
{
    const cJSON *step = report_file_step(results, name);
    const char *state = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(step, "state"));
    const char *by = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(step, "command"));
    return state != NULL && by != NULL && strcmp(state, "complete") == 0 && strcmp(by, command) == 0;
}
