/* file_io.h - pread and pwrite that repeat until all bytes are done. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* False with the reason in errno, which is 0 where the file ends too early to be read. */
bool file_read_at(int file, void *bytes, size_t n, uint64_t at);
bool file_write_at(int file, const void *bytes, size_t n, uint64_t at);
