// Reads through io_uring.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "binding/binding.h"
#include "disk/ring.h"

namespace hmt::binding {
namespace {

// What the kernel refuses is an OSError with its number.
template <typename Call>
auto told(const Call& call) {
  try {
    nb::gil_scoped_release unlocked;
    return call();
  } catch (const std::system_error& error) {
    nb::object raised = nb::borrow(PyExc_OSError)(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, raised.ptr());
    throw nb::python_error();
  }
}

// The bytes of an object with a writable buffer; the caller keeps the object.
iovec bytes_of(nb::handle memory) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(memory.ptr(), &buffer, PyBUF_WRITABLE) != 0) throw nb::python_error();
  const iovec range = {buffer.buf, static_cast<std::size_t>(buffer.len)};
  PyBuffer_Release(&buffer);
  return range;
}

void read(Ring& ring, std::uint64_t tag, int file, std::uint64_t offset, nb::sequence memory,
          bool direct) {
  std::vector<iovec> parts;
  for (nb::handle part : memory) parts.push_back(bytes_of(part));
  told([&] { ring.read(tag, file, offset, std::move(parts), direct); });
}

bool add_memory(Ring& ring, nb::handle memory) {
  const iovec range = bytes_of(memory);
  return told([&] { return ring.add_memory(range.iov_base, range.iov_len); });
}

void remove_memory(Ring& ring, nb::handle memory) {
  const iovec range = bytes_of(memory);
  told([&] { ring.remove_memory(range.iov_base); });
}

std::vector<std::pair<std::uint64_t, std::int64_t>> wait(Ring& ring) {
  std::vector<std::pair<std::uint64_t, std::int64_t>> ended;
  const auto completions = told([&] { return ring.wait(); });
  for (const Completion& one : completions) ended.emplace_back(one.tag, one.result);
  return ended;
}

}  // namespace

void bind_disk(nb::module_& m) {
  nb::class_<Ring>(m, "Ring", "Reads through io_uring, from one thread; see csrc/disk/ring.h.")
      .def(
          "__init__",
          [](Ring* self, unsigned reads) { told([&] { new (self) Ring(reads); }); },
          nb::arg("reads"), "OSError where the kernel has no io_uring for this process.")
      .def("read", read, nb::arg("tag"), nb::arg("file"), nb::arg("offset"), nb::arg("memory"),
           nb::arg("direct"), "Begin to read into `memory`, a sequence of writable buffers.")
      .def("wait", wait,
           "[(tag, bytes or -errno)] of reads that have ended; waits for one, or for `wake`.")
      .def("wake", [](Ring& ring) { told([&] { ring.wake(); }); }, "From any thread: end a wait.")
      .def("add_file", &Ring::add_file, nb::arg("file"))
      .def("remove_file", &Ring::remove_file, nb::arg("file"))
      .def("add_memory", add_memory, nb::arg("memory"))
      .def("remove_memory", remove_memory, nb::arg("memory"))
      .def_prop_ro("in_flight", &Ring::in_flight);
}

}  // namespace hmt::binding
