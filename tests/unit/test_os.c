/* test_os.c - the layer between the library and the operating system (src/base/os.h): names of
 * files with spaces, letters outside ASCII and many letters, places in files, files that are
 * replaced while they are mapped, devices and pipes, variables, and symbols of libraries. */
#include "../../src/base/file.h"
#include "../../src/base/os.h"
#include "testing.h"

#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>

static char folder[] = "/tmp/kvant-os-XXXXXX";

/* The path of a file in the folder. It is longer than Windows allows without a special form. */
static const char *path_of(const char *end)
{
    static char paths[2][512];
    static unsigned next;
    char *path = paths[next++ % 2], many[215];
    memset(many, 'x', sizeof many - 1);
    many[sizeof many - 1] = 0;
    snprintf(path, sizeof paths[0], "%s/ä ß Жλ %s %s", folder, many, end);
    return path;
}

static void write_file(const char *path, const char *text)
{
    int file;
    assert_true(kvant_os_create(path, &file));
    assert_true(kvant_os_write(file, text, strlen(text)));
    assert_true(kvant_os_flush(file));
    assert_true(kvant_os_close(file));
}

static void assert_text(const char *path, const char *text)
{
    char bytes[16] = "";
    uint64_t size = 0;
    int file;
    assert_true(kvant_os_open(path, &file));
    assert_true(kvant_os_size(file, &size));
    assert_int_equal(size, strlen(text));
    assert_true(kvant_os_read(file, bytes, strlen(text)));
    assert_string_equal(bytes, text);
    assert_true(kvant_os_close(file));
}

CASE(reads_and_writes_at_places)
{
    const char *path = path_of("places");
    char text[8] = "";
    uint64_t size = 0;
    int file, other;
    assert_false(kvant_os_exists(path));
    assert_true(kvant_os_create(path, &file));
    assert_false(kvant_os_create(path, &other));
    assert_int_equal(errno, EEXIST);
    assert_true(kvant_os_write_at(file, "abc", 3, 4));
    assert_true(kvant_os_write_at(file, "0123", 4, 0));
    assert_true(kvant_os_size(file, &size));
    assert_int_equal(size, 7);
    assert_true(kvant_os_read_at(file, text, 3, 3));
    assert_string_equal(text, "3ab");
    assert_false(kvant_os_read_at(file, text, 3, 5));
    assert_int_equal(errno, EIO);
    assert_true(kvant_os_close(file));
    assert_true(kvant_os_exists(path));
    assert_true(kvant_os_remove(path));
    assert_false(kvant_os_exists(path));
    assert_false(kvant_os_open(path, &file));
    assert_int_equal(errno, ENOENT);
}

/* A view of an index goes on reading the file that it was opened for. */
CASE(replaces_a_mapped_file)
{
    const char *old = path_of("old"), *new = path_of("new");
    uint64_t size = 0;
    int file;
    write_file(old, "the old text");
    assert_true(kvant_os_open(old, &file));
    assert_true(kvant_os_size(file, &size));
    const char *map = kvant_os_map_file(file, (size_t)size);
    assert_non_null(map);
    assert_true(kvant_os_close(file));
    write_file(new, "the new");
    assert_true(kvant_os_replace(new, old));
    assert_memory_equal(map, "the old text", 12);
    assert_false(kvant_os_exists(new));
    assert_true(kvant_os_open(old, &file));
    assert_true(kvant_os_size(file, &size));
    assert_int_equal(size, 7);
    assert_true(kvant_os_close(file));
    kvant_os_unmap(map, 12);
    assert_true(kvant_os_remove(old));
    assert_false(kvant_os_replace(new, old));
    assert_int_equal(errno, ENOENT);
}

/* A file that is written as a whole replaces what has its name, but no device and no pipe. */
CASE(devices_and_pipes_stay)
{
#if defined(_WIN32)
    skip(); /* there are no such names in folders */
#else
    const char *pipe = path_of("pipe");
    char message[1024] = "";
    const kvant_error error = { message, sizeof message };
    struct stat now;
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_int_equal(kvant_write_file(pipe, (const uint8_t *)"text", 4, &error),
                     KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(message, "pipe: it is a device or a pipe"));
    assert_int_equal(lstat(pipe, &now), 0);
    assert_true(S_ISFIFO(now.st_mode));
    assert_true(kvant_os_remove(pipe));
#endif
}

/* A file that a killed process began is in no one's way, and a file that another thread writes is
 * not touched. */
CASE(a_part_is_written_by_one_at_a_time)
{
    const char *path = path_of("whole");
    char part[512], message[1024] = "";
    const kvant_error error = { message, sizeof message };
    int file;
    snprintf(part, sizeof part, "%s" KVANT_OS_PART, path);
    write_file(part, "of a process that was killed");
    assert_int_equal(kvant_write_file(path, (const uint8_t *)"text", 4, &error), KVANT_OK);
    assert_text(path, "text");
    assert_false(kvant_os_exists(part));
    assert_true(kvant_os_begin(path, part, sizeof part, &file));
    assert_true(kvant_os_write(file, "longer", 6));
    assert_int_equal(kvant_write_file(path, (const uint8_t *)"other", 5, &error), KVANT_ERR_IO);
    assert_non_null(strstr(message, "another process or thread is writing it"));
    assert_true(kvant_os_finish(file, path, part, true));
    assert_text(path, "longer");
    assert_true(kvant_os_begin(path, part, sizeof part, &file));
    assert_false(kvant_os_finish(file, path, part, false));
    assert_text(path, "longer");
    assert_false(kvant_os_exists(part));
    assert_true(kvant_os_remove(path));
}

CASE(names_end_paths)
{
    assert_string_equal(kvant_os_file_name("a/b/c.gguf"), "c.gguf");
    assert_string_equal(kvant_os_file_name("c.gguf"), "c.gguf");
    assert_string_equal(kvant_os_file_name("a/"), "");
    assert_true(kvant_os_is_absolute("/a"));
    assert_false(kvant_os_is_absolute("a/b"));
    assert_false(kvant_os_is_absolute(""));
}

CASE(variables_are_read)
{
    assert_int_equal(setenv("KVANT_TEST_A", "first", 1), 0);
    assert_int_equal(setenv("KVANT_TEST_B", "second", 1), 0);
    const char *a = kvant_os_variable("KVANT_TEST_A"), *b = kvant_os_variable("KVANT_TEST_B");
    assert_string_equal(a, "first");
    assert_string_equal(b, "second");
    assert_null(kvant_os_variable("KVANT_TEST_NOT_SET"));
}

static void *add(void *user)
{
    return (char *)user + 1;
}

CASE(threads_are_joined)
{
    char bytes[2];
    void *result = NULL;
    pthread_t thread;
    assert_true(kvant_os_start_thread(&thread, add, bytes, 0));
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_ptr_equal(result, bytes + 1);
    assert_true(kvant_os_processors() >= 1);
    assert_true(kvant_os_process() != 0);
}

CASE(a_missing_library_has_a_reason)
{
    assert_null(kvant_os_open_library(KVANT_OS_LIBRARY("kvant-nowhere")));
    assert_non_null(strstr(kvant_os_library_error(), "kvant-nowhere"));
}

static int make_folder(void **state)
{
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

RUN_CASES(make_folder, remove_folder)
