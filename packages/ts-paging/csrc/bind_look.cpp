// Looking whether containers of Python hold what they held: once for each block and pass, so no
// Python code.
#include "bindings.h"

namespace ts::paging {
namespace {

// Whether a place yields exactly these objects, in this order. The place: a dictionary, for its
// values, or anything that can be gone through.
bool holds(PyObject* place, PyObject* expected) {
  const Py_ssize_t count = PyTuple_Size(expected);
  Py_ssize_t at = 0;
  if (PyDict_CheckExact(place)) {
    if (PyDict_Size(place) != count) return false;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(place, &position, &key, &value))
      if (value != PyTuple_GetItem(expected, at++)) return false;
    return true;
  }
  const nb::object iterator = nb::steal(PyObject_GetIter(place));
  if (!iterator.is_valid()) throw nb::python_error();
  while (true) {
    const nb::object value = nb::steal(PyIter_Next(iterator.ptr()));
    if (!value.is_valid()) break;
    if (at == count || value.ptr() != PyTuple_GetItem(expected, at++)) return false;
  }
  if (PyErr_Occurred()) throw nb::python_error();
  return at == count;
}

bool same(const nb::list& places, const nb::list& expected) {
  const Py_ssize_t count = PyList_Size(places.ptr());
  if (PyList_Size(expected.ptr()) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* values = PyList_GetItem(expected.ptr(), i);
    if (!PyTuple_CheckExact(values)) throw nb::type_error("same: expected tuples");
    if (!holds(PyList_GetItem(places.ptr(), i), values)) return false;
  }
  return true;
}

}  // namespace

void bind_look(nb::module_& m) { m.def("same", &same, "places"_a, "expected"_a); }

}  // namespace ts::paging
