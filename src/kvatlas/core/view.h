// The bytes of any object with the buffer protocol, as they are; held while this lives.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

class View {
  public:
    // Throws what Python raises for an object without such bytes (PyBUF_WRITABLE: that one may
    // write to).
    explicit View(nanobind::handle object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, flags)) throw nanobind::python_error();
    }
    View(const View &) = delete;
    View &operator=(const View &) = delete;
    ~View() { PyBuffer_Release(&buffer_); }

    uint8_t *data() const { return static_cast<uint8_t *>(buffer_.buf); }
    size_t size() const { return static_cast<size_t>(buffer_.len); }

  private:
    Py_buffer buffer_;
};
