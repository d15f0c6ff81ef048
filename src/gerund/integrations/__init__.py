"""gerund inside other libraries; each file needs its library and says so when it is absent."""
