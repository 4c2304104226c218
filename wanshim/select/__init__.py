"""Selection: the catalog of features, the matrix of versions, the decision, the variables that turn features on."""
